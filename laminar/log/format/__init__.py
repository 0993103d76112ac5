"""Values and bytes of a storage: journal frames, index entries, checkpoints, manifest, settings.

Begin with `journal_codec` and `index_entry`.
"""
