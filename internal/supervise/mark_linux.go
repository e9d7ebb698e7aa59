package supervise

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strconv"
	"strings"
)

// ProcessMark tells one process from all others: those of other machines and containers,
// and those that get its number later. It is made of the machine's boot, of the space of
// process numbers that the caller is in, and of when the process started; "" for a
// process that is not there.
func ProcessMark(pid int) string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ""
	}
	// The second field is the command's name in brackets and may hold anything.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) <= startedAt || fields[0] == "Z" || fields[0] == "X" {
		return "" // dead
	}
	sum := sha256.Sum256([]byte(string(boot) + space + "\x00" + strconv.Itoa(pid) + "\x00" + fields[startedAt]))
	return hex.EncodeToString(sum[:8])
}

// startedAt is the place of the start time, field 22, after the command's name.
const startedAt = 19
