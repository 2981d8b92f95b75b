"""What the tests of exports share: programs that are held at points, a world without processes."""
