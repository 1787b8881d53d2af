#!/bin/sh
# Runs a command as the owner of a directory that was mounted from the host, so that what it writes there belongs to
# whoever owns the checkout, and never as root.
#
#   run_as_owner DIRECTORY COMMAND [ARGUMENT ...]
#
# Started as root: steps down to the owner. A directory that root owns (docker makes it so when it is missing) is given
# to the image's own user first. Started as anyone else, or as root of a user namespace (rootless docker, where root is
# the calling user): changes nothing.
set -eu
directory=$1
shift

read -r _inside outside _count < /proc/self/uid_map
if [ "$(id -u)" -ne 0 ] || [ "$outside" -ne 0 ]; then
    exec "$@"
fi
uid=$(stat -c %u "$directory")
gid=$(stat -c %g "$directory")
if [ "$uid" -eq 0 ]; then
    uid=$(id -u tributary)
    gid=$(id -g tributary)
    chown "$uid:$gid" "$directory"
fi
exec setpriv --reuid="$uid" --regid="$gid" --clear-groups --no-new-privs -- "$@"
