"""The schema of all files on disk, without torch.

Each kind of study has a module with its settings, the header in `study.json`, the record of one image and the
summary. `study` is the life cycle shared by all kinds, `store` reads and writes tensors, checkpoints and
environments, and `legacy` reads the files of earlier versions.
"""
