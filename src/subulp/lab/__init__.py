"""Experiments: tasks that train real models under several precisions, and compare what each lost.

The command line, tasks, data readers, run directories and reports, behind the extra ``lab``; the
library never imports them. The command line is imported before any training starts, so this file
imports nothing: take what you need from the modules, e.g.
``from subulp.lab.compare import compare``.
"""
