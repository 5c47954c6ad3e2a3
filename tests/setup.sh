# Sourced by run.sh and test.sh: installs what is missing on Debian 12 or 13, and times the stages of a run.

# need_packages PACKAGE...: installs those that are not there.
need_packages() {
	if ! command -v dpkg-query >/dev/null 2>&1; then
		echo "this is no Debian: make sure that these are installed: $*"
		return 0
	fi
	missing=
	for package in "$@"; do
		case $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) in
		installed) ;;
		*) missing="$missing $package" ;;
		esac
	done
	[ -n "$missing" ] || return 0
	as_root=
	if [ "$(id -u)" -ne 0 ]; then
		command -v sudo >/dev/null 2>&1 || {
			echo "missing packages:$missing; install them as root, or install sudo" >&2
			return 1
		}
		as_root=sudo
	fi
	echo "installing$missing"
	# shellcheck disable=SC2086 # one word a package
	{
		$as_root apt-get update -qq &&
			$as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -qq \
				--no-install-recommends $missing
	} >/tmp/ingot-apt.$$ 2>&1 || {
		cat /tmp/ingot-apt.$$ >&2
		rm -f /tmp/ingot-apt.$$
		return 1
	}
	rm -f /tmp/ingot-apt.$$
}

# need_python REQUIREMENTS_FILE: brings ./.venv to what the file pins.
need_python() {
	stamp=.venv/$(basename "$1" .txt).installed
	if [ -e "$stamp" ] && cmp -s "$1" "$stamp"; then
		return 0
	fi
	[ -x .venv/bin/python ] || python3 -m venv .venv || return 1
	echo "installing $1 into .venv"
	.venv/bin/python -m pip --disable-pip-version-check install -q -r "$1" || return 1
	cp "$1" "$stamp"
}

build_packages="cmake ninja-build gcc libc6-dev libzstd-dev libxxhash-dev libcjson-dev"
test_packages="g++ clang libclang-rt-dev libcmocka-dev libdlpack-dev pkg-config binutils abigail-tools python3 python3-dev python3-venv git"

jobs=$(nproc 2>/dev/null || echo 2)
summary=
failures=0

# stage NAME COMMAND...: runs the command, times it, notes how it ended. The answer is the command's.
stage() {
	stage_name=$1
	shift
	echo
	echo "== $stage_name"
	stage_start=$(date +%s)
	stage_status=0
	"$@" || stage_status=$?
	stage_seconds=$(($(date +%s) - stage_start))
	if [ "$stage_status" -eq 0 ]; then
		stage_end=ok
	else
		stage_end="FAILED ($stage_status)"
		failures=$((failures + 1))
	fi
	echo "== $stage_name: $stage_end, $stage_seconds s"
	summary="$summary$(printf '%-28s %6s s  %s' "$stage_name" "$stage_seconds" "$stage_end")
"
	return "$stage_status"
}
