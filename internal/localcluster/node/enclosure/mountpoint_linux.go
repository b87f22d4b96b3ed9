// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// registerDir has a file for each path that an enclosure of this machine has something mounted at. Its own lock is held while any of
// them is made, changed or removed.
const registerDir = "/run"

// mountPoint is a folder that enclosures mount something at. A folder that is removed takes the mounts on it away in every mount
// namespace, so the folder goes with the last enclosure that uses it, whichever had made it.
//
// Who uses it holds a shared lock on its file in registerDir, which lists the folders that were made for it, outermost
// first. The kernel takes the lock away from a janitor that is killed; the folders then go with the next one.
type mountPoint struct {
	target string
	file   *os.File
}

// useMountPoint makes the folder, if it does not exist, and keeps it until release.
func useMountPoint(target string) (p *mountPoint, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("making the mount point %s: %w", target, err)
		}
	}()
	register, err := lockRegister()
	if err != nil {
		return nil, err
	}
	defer register.Close()
	name := "stowage-mount-point-" + strings.ReplaceAll(strings.Trim(target, "/"), "/", "-")
	file, err := os.OpenFile(filepath.Join(registerDir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	// From here on the caller releases it, also after an error.
	p = &mountPoint{target: target, file: file}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_SH); err != nil {
		return p, err
	}
	made, err := makeFolders(target)
	if len(made) > 0 {
		_, writeErr := file.WriteAt([]byte(strings.Join(made, "\n")+"\n"), 0)
		err = errors.Join(err, writeErr)
	}
	return p, err
}

// release removes the folders that were made, if nobody else uses the mount point.
func (p *mountPoint) release() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("removing the mount point %s: %w", p.target, err)
		}
	}()
	defer p.file.Close()
	register, err := lockRegister()
	if err != nil {
		return err
	}
	defer register.Close()
	err = unix.Flock(int(p.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return err
	}
	made, err := io.ReadAll(io.NewSectionReader(p.file, 0, 1<<16))
	if err != nil {
		return err
	}
	errs := []error{os.Remove(p.file.Name())}
	for _, folder := range slices.Backward(strings.Split(strings.TrimSpace(string(made)), "\n")) {
		if folder == "" { // nothing was made
			continue
		}
		if err := os.Remove(folder); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// lockRegister keeps other janitors from the register until the file is closed.
func lockRegister() (*os.File, error) {
	dir, err := os.Open(registerDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// makeFolders is os.MkdirAll that tells what it made, outermost first.
func makeFolders(path string) (made []string, err error) {
	if _, err := os.Stat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	made, err = makeFolders(filepath.Dir(path))
	if err != nil {
		return made, err
	}
	err = os.Mkdir(path, 0o755)
	if errors.Is(err, fs.ErrExist) { // somebody was faster
		return made, nil
	}
	if err != nil {
		return made, err
	}
	return append(made, path), nil
}
