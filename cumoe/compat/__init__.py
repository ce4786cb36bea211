"""The ops under the names and argument lists of other libraries; nothing here imports these."""
