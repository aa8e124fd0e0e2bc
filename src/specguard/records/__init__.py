"""The one schema of everything on disk. No torch: records are written, resumed, merged, checked and reported here.

Every kind of study has a module with its settings, the header that `study.json` holds, the record of one image and
the summary; `study` is the life cycle that all kinds share, `store` reads and writes files, `legacy` reads what
earlier versions have written.
"""
