#!/bin/sh
# Compilers whose programs run with the C library of Debian 11 (glibc 2.31) or any later one: deploy/old_glibc.sh
# FOLDER x86_64|aarch64. Packages are unpacked into FOLDER, not installed; no root needed.
#   FOLDER/MACHINE-glibc2.31-g++ (-gcc)   this machine's g++ (aarch64: the cross compiler), with the headers and the
#                                         libraries of FOLDER/root; all but glibc's are linked statically, but a shared
#                                         library takes libgomp.so.1, and looks for it beside itself
#   FOLDER/root                           of Debian 11: libc6-dev, libstdc++-10-dev, libgcc-10-dev, libedit-dev,
#                                         libcmark-dev, curl's headers; of Debian 12: libmicrohttpd, compiled without TLS
# It needs Debian's apt-get and dpkg-dev, make, and a network.
set -eu
[ $# -eq 2 ] || { sed -n '2,9p' "$0" >&2; exit 1; }
machine=$2 triplet=$2-linux-gnu
case $machine in
x86_64) architecture=amd64 prefix= ;;
aarch64) architecture=arm64 prefix=aarch64-linux-gnu- ;;
*) echo "old_glibc.sh: $machine: x86_64 or aarch64" >&2; exit 1 ;;
esac
mkdir -p "$1"
folder=$(cd "$1" && pwd)
[ ! -e "$folder/complete" ] || exit 0
root=$folder/root
rm -rf "$root" "$folder/lib" "$folder/packages"
mkdir -p "$root" "$folder/lib" "$folder/shared" "$folder/packages/lists/partial"
cd "$folder/packages"

# apt with sources, lists and a status of its own: this machine's stay as they are.
keys=/usr/share/keyrings/debian-archive-keyring.gpg
cat >sources <<END
deb [signed-by=$keys] http://deb.debian.org/debian bullseye main
deb-src [signed-by=$keys] http://deb.debian.org/debian bookworm main
END
cat >apt.conf <<END
Dir::Etc::sourcelist "$PWD/sources";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$PWD/lists";
Dir::State::status "/dev/null";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Sandbox::User "root";
END
export APT_CONFIG="$PWD/apt.conf"
apt-get update -qq
apt-get download -qq libc6 libc6-dev linux-libc-dev libcrypt1 libcrypt-dev libgcc-s1 libgcc-10-dev libstdc++-10-dev \
    libedit-dev libncurses-dev libbsd-dev libmd-dev libcmark-dev libcurl4-openssl-dev gcc-10-base libtinfo6 libgomp1
for package in *.deb; do dpkg-deb -x "$package" "$root"; done
# Absolute links mean this machine's files.
find "$root" -lname '/*' | while read -r link; do
    to=$(readlink "$link")
    ln -sfn "$root$to" "$link"
done

# -B: what the compiler links by itself. Here lie the archives alone: without the .so, so that they are taken, and
# without the headers that lie beside them, which are older than the compiler.
for file in "$root/usr/lib/gcc/$triplet"/10/*.[ao] "$root/usr/lib/$triplet"/*crt*.o; do ln -sf "$file" "$folder/lib/"; done
# An archive does not say what it needs, but a linker script does: -lgomp, -ledit, -lmicrohttpd.
rm "$folder/lib/libgomp.a"
echo "GROUP ( $root/usr/lib/gcc/$triplet/10/libgomp.a -lpthread -ldl )" >"$folder/lib/libgomp.a"
there=$root/usr/lib/$triplet
echo "GROUP ( $there/libedit.a $there/libtinfo.a $there/libbsd.a $there/libmd.a )" >"$folder/lib/libedit.a"
echo "GROUP ( $there/libmicrohttpd.a -lpthread )" >"$folder/lib/libmicrohttpd.a"
ln -sf "$root/usr/lib/$triplet/libgomp.so.1" "$folder/shared/libgomp.so" # (the archive is no position-independent code)
for compiler in gcc g++; do
    headers="-nostdinc"
    [ $compiler = gcc ] || headers="$headers -isystem $root/usr/include/c++/10 -isystem $root/usr/include/$triplet/c++/10"
    headers="$headers -isystem $($prefix$compiler -print-file-name=include)"
    # (g++ 12 suspects std::function of libstdc++ 10 of being uninitialized; psabi: Arm's calls changed with g++ 10.)
    cat >"$folder/$machine-glibc2.31-$compiler" <<END
#!/bin/sh
case " \$* " in *" -shared "*) set -- -L$folder/shared -Wl,-rpath,'\$ORIGIN' "\$@" ;; esac
exec $prefix$compiler --sysroot=$root $headers -isystem $root/usr/include/$triplet -isystem $root/usr/include "\$@" \\
    -B$folder/lib -L$folder/lib -L$root/usr/lib/$triplet -L$root/lib/$triplet -static-libgcc -Wno-maybe-uninitialized -Wno-psabi
END
    chmod +x "$folder/$machine-glibc2.31-$compiler"
done

# serve speaks HTTP; TLS is the proxy's (docs/deploy.md).
apt-get source -qq libmicrohttpd >/dev/null
cd libmicrohttpd-*/
./configure --quiet --host="$triplet" --prefix="$root/usr" --libdir="$root/usr/lib/$triplet" --disable-shared \
    --disable-https --disable-doc --disable-examples --disable-curl CC="$folder/$machine-glibc2.31-gcc" >/dev/null 2>&1
make -s -C src/microhttpd install >/dev/null
make -s -C src/include install >/dev/null
mkdir -p "$root/usr/share/doc/libmicrohttpd" && cp debian/copyright "$root/usr/share/doc/libmicrohttpd/"
touch "$folder/complete"
