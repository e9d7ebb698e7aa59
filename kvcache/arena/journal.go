//go:build unix

package arena

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// journal is the file of records. Records wait in memory until flush, which makes
// them outlive the process by one write. It is not safe for concurrent use.
type journal struct {
	root *os.Root
	id   arenaID

	file *os.File
	end  int64  // of what is written and whole
	wait []byte // records behind it

	// next is the journal that compact is writing, nil if it is not.
	next     *os.File
	nextEnd  int64
	nextWait []byte

	live int64 // bytes that a journal of the present state would take, about
}

// The files of the journal.
const (
	journalName = "journal"
	nextName    = "journal.new"
)

// openJournal opens the journal of an arena, or begins a new one, for which renew gives the
// arena another identity: of what others believe to be there nobody knows where it is. It
// hands every record to replay, and cuts off what is not whole. The count is of bytes cut off.
func openJournal(root *os.Root, id arenaID, renew func() arenaID, replay func(record)) (j *journal, cut int64, err error) {
	j = &journal{root: root, id: id}
	if err := root.Remove(nextName); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, 0, err
	}
	b, err := root.ReadFile(journalName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, 0, err
	}
	if !ofArena(b, id) {
		cut, j.id = int64(len(b)), renew()
		if j.file, err = j.begin(); err != nil {
			return nil, 0, err
		}
		j.end = journalHeader
		if err := root.Rename(nextName, journalName); err != nil {
			j.file.Close()
			return nil, 0, err
		}
		return j, cut, nil
	}
	at := journalHeader
	for at < len(b) {
		r, n, err := parseRecord(b[at:], id)
		if err != nil {
			break
		}
		replay(r)
		at += n
	}
	if j.file, err = root.OpenFile(journalName, os.O_RDWR, 0); err != nil {
		return nil, 0, err
	}
	j.end = int64(at)
	if cut = int64(len(b) - at); cut > 0 {
		err = j.file.Truncate(j.end)
	}
	return j, cut, err
}

// begin makes an empty journal under the next name.
func (j *journal) begin() (*os.File, error) {
	f, err := j.root.OpenFile(nextName, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteAt(journalHead(j.id), 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// add notes a record, to be written by the next flush.
func (j *journal) add(r record) {
	j.wait = appendRecord(j.wait, j.id, r)
	if j.next != nil {
		j.nextWait = appendRecord(j.nextWait, j.id, r)
	}
}

// flush writes what waits, in one call: one that is killed in the middle of it leaves whole
// records and at most one that is cut off. It writes what waits. After an error it waits on, and the next flush tries again
// in the same place.
func (j *journal) flush() error {
	if len(j.wait) == 0 {
		return nil
	}
	n, err := j.file.WriteAt(j.wait, j.end)
	if err != nil {
		return fmt.Errorf("write %d bytes of journal: %w", len(j.wait)-n, err)
	}
	j.end += int64(len(j.wait))
	j.wait = j.wait[:0]
	return nil
}

// grown says whether the journal is much longer than it has to be.
func (j *journal) grown() bool { return j.next == nil && j.end > 2*j.live+(1<<20) }

// compact begins a new journal. From here on every record goes into both; the caller
// adds the present state by rewrite, in any pieces, and then calls swap. A record that
// changes what was not rewritten yet does no harm before or behind it, since replaying
// a state twice is the same as once.
func (j *journal) compact() (err error) {
	j.nextEnd, j.nextWait = journalHeader, nil
	j.next, err = j.begin()
	return err
}

// rewrite adds a record of the present state to the new journal, which must be begun.
// It waits in memory until flushNext or swap.
func (j *journal) rewrite(r record) { j.nextWait = appendRecord(j.nextWait, j.id, r) }

// flushNext writes what waits for the new journal.
func (j *journal) flushNext() error {
	if _, err := j.next.WriteAt(j.nextWait, j.nextEnd); err != nil {
		return fmt.Errorf("write the new journal: %w", err)
	}
	j.nextEnd += int64(len(j.nextWait))
	j.nextWait = j.nextWait[:0]
	return nil
}

// swap puts the new journal in the place of the old one. What waited for the old one
// is in the new one.
func (j *journal) swap() error {
	if err := j.flushNext(); err != nil {
		return err
	}
	if err := j.root.Rename(nextName, journalName); err != nil {
		return fmt.Errorf("put the new journal in place: %w", err)
	}
	j.file.Close()
	j.file, j.end, j.live = j.next, j.nextEnd, j.nextEnd
	j.wait = j.wait[:0]
	j.next, j.nextWait = nil, nil
	return nil
}

// giveUp ends a compaction that failed.
func (j *journal) giveUp() {
	if j.next != nil {
		j.next.Close()
		j.next, j.nextWait = nil, nil
		_ = j.root.Remove(nextName) // the next compaction or start does
	}
}

// close closes the files; the caller has flushed.
func (j *journal) close() {
	j.giveUp()
	j.file.Close()
}
