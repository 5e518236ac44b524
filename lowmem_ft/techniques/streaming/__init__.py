"""Weights kept in host memory and streamed through the device."""
