"""Tilewise inside other libraries, each module imported only by the one who asks for it.

transformers: models and Trainers. diffusers: pictures and videos. data: packed batches. slots:
modules that stand where another library's stood. Files beside these folders are the paths by which
programs import them.
"""
