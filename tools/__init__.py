"""What the authors of the series use: building notebooks and looking for mistakes in them."""
