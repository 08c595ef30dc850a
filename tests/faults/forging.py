"""A data set whose checksums are all right and whose facts are not: someone meant harm.

Written against the format alone (README, "Files"), with none of the product's own code.
"""

import hashlib
import json
import zlib

import google_crc32c

BAD = "shard-000001"


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def forge_file(path, file, content, *, shard=BAD):
    """A file of a shard, with a COMMIT.json and a manifest line that agree with it."""
    (path / "shards" / shard / file).write_bytes(content)
    facts = {"bytes": len(content), "crc32": zlib.crc32(content)}
    forge_commit(path, lambda commit: commit["files"].update({file: facts}), shard=shard)


def forge_json(path, file, change, *, shard=BAD):
    """`change` edits a zarr.json of a shard in place."""
    facts = json.loads((path / "shards" / shard / file).read_text())
    change(facts)
    forge_file(path, file, json.dumps(facts).encode(), shard=shard)


def forge_commit(path, change, *, shard=BAD):
    """`change` edits COMMIT.json in place, or gives its content as bytes."""
    file = path / "shards" / shard / "COMMIT.json"
    facts = json.loads(file.read_text())
    content = change(facts) or json.dumps(facts).encode()
    file.write_bytes(content)
    crc32c = google_crc32c.value(content)
    forge_line(path, lambda line: line.update(commit_crc32c=crc32c), shard=shard)


def forge_line(path, change, *, shard=BAD):
    """`change` edits a manifest line in place."""
    file = path / "manifest" / "rank-00.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for facts in lines:
        del facts["crc32c"]
        if facts["name"] == shard:
            change(facts)
        facts["crc32c"] = google_crc32c.value(json.dumps(facts, sort_keys=True).encode())
    file.write_text("".join(json.dumps(facts) + "\n" for facts in lines))


def forge_dataset(path, change):
    """`change` edits dataset.json in place; every shard is made to belong to it."""
    file = path / "dataset.json"
    facts = json.loads(file.read_text())
    del facts["sha256"]
    change(facts)
    sha256 = hashlib.sha256(canonical(facts)).hexdigest()
    file.write_text(json.dumps({**facts, "sha256": sha256}))
    for shard in sorted((path / "shards").iterdir()):
        forge_commit(path, lambda c: c.update(dataset_sha256=sha256), shard=shard.name)
