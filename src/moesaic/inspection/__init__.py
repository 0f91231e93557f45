"""What a converted model is, what it lost and where: as data, and as a page."""
