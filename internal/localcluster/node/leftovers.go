// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// overlayfsMagic is OVERLAYFS_SUPER_MAGIC of linux/magic.h.
const overlayfsMagic = 0x794c7630

func onOverlay(path string) bool {
	var stat syscall.Statfs_t
	return syscall.Statfs(path, &stat) == nil && int64(stat.Type) == overlayfsMagic
}

// leftovers looks for what the node should have taken with it. Links go shortly after their network namespaces, which the kernel removes
// in the background.
func (n *Node) leftovers() error {
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := n.leftoversNow()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (n *Node) leftoversNow() error {
	var errs []error
	hierarchies, err := enclosure.Hierarchies()
	errs = append(errs, err)
	for _, root := range hierarchies {
		path := filepath.Join(root, n.cgroup)
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("cgroup %s is left", path))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	errs = append(errs, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.layout.dir+"/") {
			errs = append(errs, fmt.Errorf("mount is left: %s", strings.TrimSpace(line)))
		}
	}
	if n.network.pods.IsValid() {
		links, err := n.network.links()
		errs = append(errs, err)
		if len(links) > 0 {
			errs = append(errs, fmt.Errorf("links %v are left", links))
		}
	}
	if n.enclosure != nil {
		pids, err := n.enclosure.Processes()
		errs = append(errs, err)
		if len(pids) > 0 {
			errs = append(errs, fmt.Errorf("processes %v are left", pids))
		}
	}
	return errors.Join(errs...)
}
