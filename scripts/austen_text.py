"""Extract Jane Austen's novels as plain paragraphs from Debian's `r-cran-janeaustenr`.

The novels are the only long public-domain English prose that a package registry hands out without a download from
elsewhere. The package keeps them as R character vectors, one string a printed line, in a lazy-load database:

    Rdata.rdb:  [u32 length][zlib stream of one serialized character vector] [u32 length][zlib stream] ...

so forty lines of reading are enough and R is not needed. Emma and Persuasion are for evaluation and are never used in
the calibration prompts; the other four novels are for those prompts and are never evaluated on.

    apt-get download r-cran-janeaustenr && dpkg-deb -x r-cran-janeaustenr_*.deb /tmp/austen
    python -m scripts.austen_text /tmp/austen /tmp/novels
"""

import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
STRING_VECTOR = 16  # R's SEXPTYPE of a character vector


def read_string_vector(serialized: bytes) -> list[str]:
    """Strings of one R character vector in XDR serialization, version 3 (which names the native encoding)."""
    encoding_length = struct.unpack(">i", serialized[14:18])[0]
    position = 18 + encoding_length
    flags, count = struct.unpack(">Ii", serialized[position : position + 8])
    if flags & 0xFF != STRING_VECTOR:
        raise ValueError(f"expected an R character vector (type {STRING_VECTOR}), got type {flags & 0xFF}")
    position += 8
    strings = []
    for _ in range(count):
        length = struct.unpack(">i", serialized[position + 4 : position + 8])[0]
        position += 8
        strings.append(serialized[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return strings


def read_database(path: Path) -> Iterator[list[str]]:
    """Each character vector of a lazy-load database, in file order."""
    data = path.read_bytes()
    while data:
        inflater = zlib.decompressobj()
        yield read_string_vector(inflater.decompress(data[4:]))
        data = inflater.unused_data


def join_paragraphs(lines: list[str]) -> str:
    """Undo the hard line breaks: one line a paragraph, an empty line between two."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph) + "\n"


def main() -> None:
    """Write one .txt file a novel, named after its first line."""
    package, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for lines in read_database(package / DATABASE):
        name = lines[0].strip().lower().replace(" ", "_")
        (folder / f"{name}.txt").write_text(join_paragraphs(lines), encoding="utf-8")
        print(f"{folder / name}.txt: {len(lines)} lines")


if __name__ == "__main__":
    main()
