"""One file for each page or group of pages."""
