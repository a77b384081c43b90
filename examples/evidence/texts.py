# SPDX-License-Identifier: Apache-2.0
"""Texts of the language families: fetched once, split by whole files, cut to sequences."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from family import whole_folder
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Part = Literal["train", "validation", "test"]
Kind = Literal["repair", "experts", "control", "untrained"]
Settings = dict[str, Any]
SOURCES = Path(__file__).with_name("sources.yml")
HELD_OUT = {"test": 0.15, "validation": 0.1}  # shares of the groups
SHORTEST_FILE = 2000  # characters; shorter files are headings and notices
SEQUENCE = 256  # tokens
PLAIN_WORD = re.compile(r"[a-z]{4,10}")


def read_sources(kind: Kind) -> dict[str, Settings]:
    """Return the entries of one kind of sources.yml by name."""
    return yaml.safe_load(SOURCES.read_text(encoding="utf-8"))[kind]


def prepare_texts(name: str, settings: Settings, cache: Path) -> Path:
    """Return the folder of a source's train.jsonl, validation.jsonl and test.jsonl.

    A line is a document, ``{"text": …}``, or a question, ``{"prompt": …, "answer": …}``.
    """
    folder = cache / "texts" / name
    if folder.exists():
        return folder
    reader = READERS[settings.get("reader", "text")]
    lines = sorted(reader(settings, cache / "packages"), key=lambda line: shuffled(line["group"]))
    groups = list(dict.fromkeys(line["group"] for line in lines))
    part_of: dict[str, str] = dict.fromkeys(groups, "train")
    start = 0
    for part, share in HELD_OUT.items():
        count = max(1, round(share * len(groups)))
        part_of |= dict.fromkeys(groups[start : start + count], part)
        start += count

    with whole_folder(folder) as partial:
        for part in ("train", *HELD_OUT):
            chosen = [line for line in lines if part_of[line["group"]] == part]
            # Questions of one group would tell each other's answers if they were neighbours.
            chosen.sort(key=lambda line: shuffled(line.get("prompt", line["group"])))
            rows = (json.dumps(line) + "\n" for line in chosen)
            (partial / f"{part}.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder


def shuffled(group: str) -> str:
    """Return the sorting key of a group: chapters of one name fall in one part in all languages."""
    return hashlib.sha256(group.encode()).hexdigest()


def read_sequences(
    folder: Path, part: Part, tokenizer: PreTrainedTokenizerBase, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of evenly spaced sequences, both (n, SEQUENCE); −100 is not scored.

    Args:
        folder: see `prepare_texts`.
        count: at most so many sequences; all by default.
    """
    rows = (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(row) for row in rows]
    if "prompt" in lines[0]:
        ids, labels = pack_questions(lines, tokenizer, count)
    else:
        ids = labels = pack_documents(lines, tokenizer)
    chosen = torch.linspace(0, len(ids) - 1, min(count or len(ids), len(ids))).round().long()
    return ids[chosen], labels[chosen]


def pack_documents(lines: list[dict], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return all documents one after the other, cut to sequences, (n, SEQUENCE)."""
    tokens: list[int] = []
    for ids in tokenizer([line["text"] for line in lines], verbose=False)["input_ids"]:
        tokens += [*ids, tokenizer.eos_token_id]
    whole = tokens[: len(tokens) // SEQUENCE * SEQUENCE]
    return torch.tensor(whole, dtype=torch.long).view(-1, SEQUENCE)


def pack_questions(
    lines: list[dict], tokenizer: PreTrainedTokenizerBase, count: int | None
) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of whole questions, padded to sequences; answers are scored."""
    plain = {"add_special_tokens": False, "verbose": False}
    prompts = tokenizer([line["prompt"] for line in lines], **plain)["input_ids"]
    answers = tokenizer([f" {line['answer']}\n" for line in lines], **plain)["input_ids"]
    rows: list[tuple[list[int], list[int]]] = [([], [])]
    for prompt, answer in zip(prompts, answers, strict=True):
        length = len(prompt) + len(answer)
        if length > SEQUENCE:
            continue
        if len(rows[-1][0]) + length > SEQUENCE:
            if len(rows) == count:
                break
            rows.append(([], []))
        rows[-1][0].extend([*prompt, *answer])
        rows[-1][1].extend([-100] * len(prompt) + answer)
    end = tokenizer.eos_token_id
    ids = [row + [end] * (SEQUENCE - len(row)) for row, _ in rows]
    labels = [row + [-100] * (SEQUENCE - len(row)) for _, row in rows]
    return torch.tensor(ids), torch.tensor(labels)


def run_command(*command: str, folder: Path) -> str:
    """Return what a command prints; end the program with its complaint where it fails."""
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not installed: copy the cache from a Debian or Ubuntu machine.")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)} failed: {error.stderr.strip()}")
    return run.stdout


def fetch_package(kind: Literal["apt", "pip"], name: str, packages: Path) -> Path:
    """Return the folder with the files of a Debian package or wheel; download it if it is new."""
    folder = packages / f"{kind}-{name}"
    if folder.exists():
        return folder
    print(f"fetching {name}", flush=True)
    with whole_folder(folder) as partial:
        if kind == "apt":
            run_command("apt-get", "download", name, folder=partial)
            (archive,) = partial.glob("*.deb")
            run_command("dpkg-deb", "-x", str(archive), str(partial), folder=partial)
        else:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name)
            run_command(*pip, folder=partial)
            (archive,) = partial.glob("*.whl")
            shutil.unpack_archive(archive, partial, "zip")
        archive.unlink()
    return folder


def find_files(settings: Settings, packages: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file that a source names."""
    if "folder" in settings:
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        kind: Literal["apt", "pip"] = "apt" if "apt" in settings else "pip"
        root = fetch_package(kind, settings[kind], packages)
    patterns = settings["files"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for path in sorted(root.glob(pattern)):
            place = path.relative_to(root).as_posix()
            if not any(fnmatch(place, other) for other in settings.get("without", ())):
                yield path.name if pattern.count("*") == 1 else place, path


def read_documents(settings: Settings, packages: Path) -> Iterator[dict]:
    """Yield the text of every file that is long enough."""
    for name, path in find_files(settings, packages):
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if path.suffix == ".html":
            text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
            text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text))).strip()
        if len(text) >= SHORTEST_FILE:
            yield {"group": name, "text": text}


def read_sections(settings: Settings, packages: Path) -> Iterator[dict]:
    """Yield descriptions of packages, with their section as the answer."""
    packages.mkdir(parents=True, exist_ok=True)
    index = run_command("apt-cache", "dumpavail", folder=packages)
    seen = set()
    for paragraph in index.split("\n\n"):
        fields = dict(re.findall(r"(?m)^([A-Z][\w-]*): (.*)$", paragraph))
        text = fields.get("Description", "")
        if fields.get("Section") in settings["options"] and len(text) > 20 and text not in seen:
            seen.add(text)
            group = fields.get("Source", fields["Package"]).split()[0]
            yield {"group": group, "prompt": f"{text}\nSection:", "answer": fields["Section"]}


def read_pronunciations(settings: Settings, packages: Path) -> Iterator[dict]:
    """Yield plain words and how they are spoken, without stress."""
    for _, path in find_files(settings, packages):
        for line in path.read_text(encoding="utf-8").splitlines():
            word, _, sounds = line.partition("#")[0].strip().partition(" ")
            if PLAIN_WORD.fullmatch(word):
                answer = re.sub(r"\d", "", sounds)
                yield {"group": word[:4], "prompt": f"{word}:", "answer": answer}


READERS = {"text": read_documents, "sections": read_sections, "pronunciations": read_pronunciations}
