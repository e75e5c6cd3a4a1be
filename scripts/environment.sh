# Sourced by the scripts beside it: gives them $PYTHON, a Python of the private `.venv` with what they need installed.
# Not for devices: there the distribution is installed into a venv of its own (deploy/).
#
#   . "$(dirname "$0")/environment.sh"
#   set_up demo            # or: test | test torch | (nothing: only what the programs need)
#
# The first run installs the project editable with the pins of constraints.txt; later runs compare one hash and are
# instant, also offline. ISTHMUS_PYTHON names the Python to build the venv from, where the first one found will not do.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

# The first Python ≥ 3.11 that can make a venv (Debian's cannot without the package python3-venv).
find_python() {
  local candidate
  for candidate in ${ISTHMUS_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "needs Python 3.11 or newer with venv and pip, and found none" \
    "(on Debian: apt-get install python3 python3-venv; where the system's is older, as on JetPack 6, see" \
    "docs/arm.md; or set ISTHMUS_PYTHON to one)"
}

pip_install() {
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint "$ROOT/scripts/constraints.txt" "$@" \
    >>"$VENV/set-up.log" 2>&1
}

make_venv() {
  local base
  base=$(find_python) || exit 1
  echo "Making the private .venv with $base …" >&2
  "$base" -m venv "$VENV" || { rm -rf "$VENV"; fail "$base could not make a venv in $VENV"; }
}

set_up() {
  local extras wanted stamp started
  extras=$(IFS=,; echo "$*")
  [ -x "$PYTHON" ] || make_venv
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" "$ROOT"/split/codec/native/* <(echo "$ROOT") |
    sha256sum | cut -d' ' -f1)
  stamp="$VENV/set-up-${extras:-programs}"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  (
    flock 9 # two scripts started at once set up one after the other
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0
    started=$SECONDS
    echo "Installing what ${0##*/} needs into .venv (once; a minute or two) …" >&2
    : >"$VENV/set-up.log"
    # The build backend is installed too, pinned like the rest: pip's build isolation would take the newest.
    if ! { pip_install hatchling editables && pip_install --no-build-isolation --editable "$ROOT${extras:+[$extras]}"; }; then
      grep -v '^WARNING' "$VENV/set-up.log" | tail -n 15 >&2
      fail "the installation failed; the whole story is in $VENV/set-up.log"
    fi
    echo "$wanted" >"$stamp"
    echo "Installed in $((SECONDS - started)) s." >&2
  ) 9>"$VENV/set-up.lock" || exit 1
}
