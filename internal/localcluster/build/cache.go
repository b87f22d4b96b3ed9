// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// lockInterval is the pause between two attempts to take the build lock.
const lockInterval = 200 * time.Millisecond

// unusedLife is how long a store is kept without being used.
const unusedLife = 30 * 24 * time.Hour

// CacheDir is where all built programs of this user are kept.
func CacheDir() (string, error) {
	if dir := os.Getenv("STOWAGE_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding a cache folder for the cluster's programs (STOWAGE_CACHE names one): %w", err)
	}
	return filepath.Join(dir, "stowage"), nil
}

// store is the cache folder of one module at one state of its sources, flags,
// Go version and platform. A program in bin is complete: it is renamed there.
type store struct {
	module module
	dir    string
}

func newStore(cache string, m module) (*store, error) {
	key, err := m.key()
	if err != nil {
		return nil, fmt.Errorf("computing the cache key of build module %s: %w", m.name, err)
	}
	version, err := m.version(m.versionOf)
	if err != nil {
		return nil, err
	}
	return &store{module: m, dir: filepath.Join(cache, fmt.Sprintf("%s-%s-%s", m.name, version, key))}, nil
}

// key changes whenever the programs could.
func (m module) key() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	for _, p := range m.programs {
		args, err := m.arguments(p)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %q\n", p.name, args)
	}
	err := m.files(func(name string, data []byte) error {
		fmt.Fprintf(h, "%s %d\n%s", name, len(data), data)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil))[:12], err
}

func (s *store) binDir() string            { return filepath.Join(s.dir, "bin") }
func (s *store) binary(name string) string { return filepath.Join(s.binDir(), name) }
func (s *store) sourceDir() string         { return filepath.Join(s.dir, "src") }
func (s *store) missing(ps []program) []program {
	var missing []program
	for _, p := range ps {
		if _, err := os.Stat(s.binary(p.name)); err != nil {
			missing = append(missing, p)
		}
	}
	return missing
}

// ensure builds what is missing of the wanted programs, under the store's lock.
func (s *store) ensure(ctx context.Context, progress io.Writer, compile compiler, wanted []program) error {
	if len(wanted) == 0 {
		return nil
	}
	if len(s.missing(wanted)) == 0 {
		return s.markUsed()
	}
	if err := os.MkdirAll(s.binDir(), 0o755); err != nil {
		return fmt.Errorf("making the cache of the cluster's programs: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(s.dir, "lock"), func() {
		fmt.Fprintf(progress, "waiting for another process that builds into %s\n", s.dir)
	})
	if err != nil {
		return err
	}
	defer unlock()

	missing := s.missing(wanted) // another process may have built some meanwhile
	if len(missing) == 0 {
		return nil
	}
	if err := s.module.write(s.sourceDir()); err != nil {
		return fmt.Errorf("writing build module %s: %w", s.module.name, err)
	}
	for i, p := range missing {
		title := fmt.Sprintf("%s (%d/%d)", s.module.title(p), i+1, len(missing))
		if err := s.build(ctx, progress, compile, p, title); err != nil {
			return err
		}
	}
	if err := s.markUsed(); err != nil {
		return err
	}
	return s.removeUnused(progress)
}

// markUsed notes, in the folder's modification time, that the store is in use.
func (s *store) markUsed() error {
	now := time.Now()
	err := os.Chtimes(s.dir, now, now)
	if errors.Is(err, fs.ErrPermission) {
		return nil // a cache that somebody else keeps for us
	}
	return err
}

// removeUnused removes the stores of the same module that nobody has used for
// a long time; each takes about half a gigabyte.
func (s *store) removeUnused(progress io.Writer) error {
	stores, err := filepath.Glob(filepath.Join(filepath.Dir(s.dir), s.module.name+"-v*-*"))
	if err != nil {
		return err
	}
	for _, dir := range stores {
		info, err := os.Stat(dir)
		if err != nil || dir == s.dir || time.Since(info.ModTime()) < unusedLife {
			continue
		}
		fmt.Fprintf(progress, "removing %s, unused since %s\n", dir, info.ModTime().Format(time.DateOnly))
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("removing an old cache: %w", err)
		}
	}
	return nil
}

func (s *store) build(ctx context.Context, progress io.Writer, compile compiler, p program, title string) error {
	args, err := s.module.arguments(p)
	if err != nil {
		return err
	}
	temp, err := os.MkdirTemp(s.dir, "building-")
	if err != nil {
		return fmt.Errorf("building %s: %w", p.name, err)
	}
	defer os.RemoveAll(temp)

	done := reportProgress(progress, title)
	output := filepath.Join(temp, p.name)
	err = compile(ctx, s.sourceDir(), output, args)
	done(err)
	if err != nil {
		return fmt.Errorf("building %s: %w", p.name, err)
	}
	if err := os.Rename(output, s.binary(p.name)); err != nil {
		return fmt.Errorf("putting %s into the cache: %w", p.name, err)
	}
	return nil
}

// reportProgress says that a build begins, every half minute that it goes on,
// and, when the returned function is called, that it has ended.
func reportProgress(progress io.Writer, title string) (done func(error)) {
	const interval = 30 * time.Second
	begin := time.Now()
	elapsed := func() time.Duration { return time.Since(begin).Round(time.Second) }
	fmt.Fprintf(progress, "building %s ...\n", title)

	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				fmt.Fprintf(progress, "building %s ... %s\n", title, elapsed())
			}
		}
	}()
	return func(err error) {
		close(stop)
		<-stopped
		if err != nil {
			fmt.Fprintf(progress, "building %s failed after %s\n", title, elapsed())
			return
		}
		fmt.Fprintf(progress, "built %s in %s\n", title, elapsed())
	}
}

// lock takes an exclusive lock on a file. It calls waiting once when somebody
// else holds it. The kernel releases the lock when its holder dies.
func lock(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the build lock: %w", err)
	}
	ticker := time.NewTicker(lockInterval)
	defer ticker.Stop()
	for first := true; ; first = false {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("waiting for the build lock %s: %w", path, context.Cause(ctx))
		case <-ticker.C:
		}
	}
}

// tail is the end of a command's output, for an error message.
func tail(output []byte) string {
	const maxLines = 30
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	if len(lines) > maxLines {
		lines = lines[len(lines)-maxLines:]
	}
	return strings.Join(lines, "\n")
}
