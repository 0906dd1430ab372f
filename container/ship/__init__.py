"""The commands that take a model file to a live endpoint: pack, push, deploy, update, delete, invoke, bench."""
