"""Adapters next to frozen weights, by PEFT."""
