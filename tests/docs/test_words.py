"""Docstrings and comments of the package are plain sentences: a function's begins with a verb in the imperative."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.project_files import ROOT, syntax_nodes

PACKAGE = ROOT / "src" / "intaglio"
UNCLEAR_START = re.compile(r"(Of|What|Whether|Where|Who|Whose|Which|How|Why|As|Behind|In place of)\b")
UNCLEAR_WORD = re.compile(
    r"\b(nobody|somebody|everybody|everyone|whom|lies|stands|(is|are) no|has none|have none)\b", re.IGNORECASE
)
NOT_A_VERB = re.compile(
    r"(A|All|An|And|Any|At|By|Each|Every|For|From|Free|If|In|Input|It|No|None|Not|Nothing|On|One|Only|Or|Output|Site|"
    r"Some|That|The|These|They|This|Two|Value|When|While|With|Without)"
)
NATIVE = (".h", ".c", ".cpp")


def docstrings(path: Path) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield every docstring of a file with its owner and line."""
    for node in syntax_nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node, node.body[0].lineno, text


def starts_with_verb(docstring: str) -> bool:
    """Return whether the first word can be an imperative: capitalized, no plural or third person, no other word."""
    first = docstring.split()[0].rstrip(".,:;")
    if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", first) or UNCLEAR_START.match(first) or NOT_A_VERB.fullmatch(first):
        return False
    return not first.endswith("s") or first.endswith("ss")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings and other strings that stand as statements, with their lines.

    Finding comments takes long: those of files without an unclear word anywhere are left out.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix in NATIVE:
        yield from ((n, line.partition("//")[2]) for n, line in enumerate(source.splitlines(), 1) if "//" in line)
        return
    if UNCLEAR_WORD.search(source):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in syntax_nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def test_docstrings_of_functions_begin_with_a_verb():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in PYTHON_FILES
        for node, line, text in docstrings(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not starts_with_verb(text)
    ]
    assert not found, "say what the function does or returns:\n" + "\n".join(found)


def test_docstrings_do_not_answer_a_question_that_was_not_asked():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in PYTHON_FILES
        for _, line, text in docstrings(path)
        if UNCLEAR_START.match(text)
    ]
    assert not found, "say what the class or module is:\n" + "\n".join(found)


def test_comments_and_docstrings_use_plain_words():
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", *NATIVE)]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group(0)!r}"
        for path in files
        for line, text in texts(path)
        if (match := UNCLEAR_WORD.search(text))
    ]
    assert not found, "say it in other words:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "verb"),
    [
        ("Return the strides of a value.", True),
        ("Dequantize rows.", True),
        ("Process one batch.", True),
        ("Of a body, loops in it unrolled.", False),
        ("Returns the strides.", False),
        ("f32[n, c] to u8[n, c].", False),
        ("The strides of a value.", False),
    ],
)
def test_the_docstring_check_distinguishes_verbs_from_nouns(docstring, verb):
    assert starts_with_verb(docstring) is verb
