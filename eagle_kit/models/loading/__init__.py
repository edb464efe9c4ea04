"""Loading of targets: names and folders, published checkpoint layouts, known sizes."""
