"""Memory over time as pictures and HTML pages."""
