"""Adapters beside frozen weights, by PEFT."""
