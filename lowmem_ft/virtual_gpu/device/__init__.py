"""The device ``vgpu``: registration with torch, placement, streams, events, copies."""
