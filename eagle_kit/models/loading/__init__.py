"""Where weights come from: names, folders, published layouts."""
