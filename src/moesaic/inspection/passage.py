"""The text that a model is shown where the user names none: prose, numbers, code."""

PASSAGE = """\
The keeper counted the ships twice every evening. On Tuesday there were seventeen; by \
Friday only four had come back. "Storms," he said, and lit the lamp.

def at_sea(left, back):
    return [ship for ship in left if ship not in back]

In 1912 the harbour moved 38,500 tonnes of grain, 12 % more than the year before. Water \
boils at a lower temperature on a mountain, because the air presses on it less. Who would \
have thought that tea could teach physics? She had sailed with her father since she was \
nine, and she knew the rocks by their names. Most people who come to the island stay for a \
week, and a few of them stay for good; the winters are long, but there is always somebody \
who will lend you a book, a boat or a loaf of bread. If the wind turns north before noon, \
the boats go out again; if it does not, the nets are mended and the children learn to tie \
knots. The museum opens at ten, closes at four, and holds exactly one painting.
"""
