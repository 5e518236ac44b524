"""Where rows come from: local files, the hub, splits."""
