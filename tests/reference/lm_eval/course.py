"""Functions of course_mc.yaml and course_chat.yaml: a row of data/course/mc_*.jsonl as answers and a target."""


def choices(doc):
    """The answers as rows of the data have them ("B. ..."), to the end of the turn."""
    return [f"{letter}. {text}<|im_end|>\n" for letter, text in zip("ABCDEFGH", doc["choices"])]


def target(doc):
    return "ABCDEFGH".index(doc["choice"])


def without_choices(docs):
    """The harness takes a column `choices` for the answers to a generated text."""
    return docs.remove_columns("choices")
