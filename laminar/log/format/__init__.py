"""Values and bytes of a storage: journal frames, index entries, checkpoints, settings.

Begin with `journal_codec` and `index_entry`.
"""
