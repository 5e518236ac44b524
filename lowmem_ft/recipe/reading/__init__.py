"""Reading recipes: files, references, ``key=value`` settings, keys, and errors in them."""
