"""The book of answers: what treeopt decides for fixed inputs, so that nothing that it decides moves unseen.

`cases.py` has the inputs with the commands, `book/` the answers as JSON, `book.py` makes and compares them.
"""
