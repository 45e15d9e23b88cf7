#!/usr/bin/env bash
# On Debian: fetches the C library of Debian 11 (glibc 2.31), checked by apt, into FOLDER, for wheels to link against:
# what is linked against it runs on that glibc and every later one. Fails where it cannot be had.
# Usage: old_glibc.sh FOLDER
set -euo pipefail
folder=$1
suite=bullseye
if ls "$folder"/sysroot/usr/lib/*/libc.so >/dev/null 2>&1; then exit 0; fi
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
folder=$(cd "$folder" && pwd)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
site=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Origin: Debian' | awk '$1 !~ /security/ { print $1; exit }')
[ -n "$site" ] && [ -e "$keys" ]
echo "deb [signed-by=$keys] $site $suite main" >"$folder/sources.list"
options=(-qq -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Acquire::Check-Valid-Until=false
  -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
cd "$folder"
apt-get "${options[@]}" download "libc6/$suite" "libc6-dev/$suite"
for package in libc6_*.deb libc6-dev_*.deb; do dpkg -x "$package" sysroot; done
# Links into / become links into the tree.
find sysroot/usr/lib -type l | while read -r link; do
  target=$(readlink "$link")
  if [[ $target == /* ]]; then ln -sf "$folder/sysroot$target" "$link"; fi
done
