package fetch

import (
	"fmt"
	"strings"
)

// Item is one asset that Ensure would fetch.
type Item struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	// Download and Disk are bytes: over the network, and unpacked in the cache.
	Download int64 `json:"download_bytes"`
	Disk     int64 `json:"disk_bytes"`
}

// Plan lists what Ensure would fetch; empty when all is there or the user's own.
// own holds the paths of the latter, and of a Redis of the system's.
func Plan(cfg Config, names ...string) (own Paths, items []Item, err error) {
	own, err = each(cfg, names, func(cfg Config, a asset) (string, error) {
		if dir := a.dir(cfg); !complete(dir, a) {
			items = append(items, Item{a.name, a.version, a.download(), a.unpacked})
		}
		return "", nil
	})
	return own, items, err
}

// Announce says for people what is going to be fetched and for how long.
func Announce(items []Item) string {
	if len(items) == 0 {
		return "nothing to fetch, all is in the cache"
	}
	// One line: it goes above the progress and into logs of builds.
	var download, disk int64
	var parts []string
	for _, it := range items {
		download += it.Download
		disk += it.Disk
		parts = append(parts, fmt.Sprintf("%s %s (%s)", it.Name, it.Version, size(it.Download)))
	}
	return fmt.Sprintf("to fetch: %s: %s in all, %s on disk; about %s at 100 Mbit/s, %s at 20 Mbit/s",
		strings.Join(parts, ", "), size(download), size(disk), minutes(download, 100), minutes(download, 20))
}

// minutes is how long a download takes at a rate in Mbit/s, rounded up.
func minutes(bytes int64, rate int64) string {
	// Two rates instead of a guess at the user's: a good line and a slow one.
	n := (bytes*8/(rate*1e6) + 59) / 60
	if n <= 1 {
		return "1 minute"
	}
	return fmt.Sprintf("%d minutes", n)
}
