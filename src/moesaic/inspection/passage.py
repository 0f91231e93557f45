"""The text that a model is shown where the user names none: prose, numbers, code."""

PASSAGE = """\
The old lighthouse keeper counted the ships twice every evening. On Tuesday there were
seventeen; by Friday only four had come back. "Storms," he said, and lit the lamp.

In 1912 the harbour moved 38,500 tonnes of grain, about 12 % more than the year before.

def ships_at_sea(left, returned):
    return [ship for ship in left if ship not in returned]

Water boils at a lower temperature on a mountain, because the air presses on it less.
Who would have thought that tea could teach physics?
"""
