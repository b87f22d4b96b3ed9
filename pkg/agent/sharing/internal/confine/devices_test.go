// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDevicesThatComeIntoSightLater, on what is mounted on the host then, are as closed as those of its start: a tenant can have made
// them on a volume.
func TestDevicesThatComeIntoSightLater(t *testing.T) {
	const script = `until [ -e DIR/late/go ]; do read -t 0.02 <> /tmp/own/never; done
for node in console null zero loop; do if (exec 3< DIR/late/$node); then echo opens $node; fi; done`
	for kind, c := range kinds(t) {
		for _, unconfined := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, unconfined=%t", kind, unconfined), func(t *testing.T) {
				dir, err := os.MkdirTemp("/var/tmp", testParent+"-")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)); err != nil {
						t.Error(err)
					}
				})
				if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
					t.Fatal(err)
				}
				late := filepath.Join(dir, "late")
				if err := errors.Join(unix.Mount("", dir, "", unix.MS_SHARED, ""), os.Mkdir(late, 0o755)); err != nil {
					t.Fatal(err)
				}
				g, folder := c.Group("later"), t.TempDir()
				end(t, g)
				if err := unix.Mkfifo(filepath.Join(folder, "never"), 0o600); err != nil {
					t.Fatal(err)
				}
				p := shell(folder, strings.ReplaceAll(script, "DIR", dir))
				p.Paths, p.Unconfined = []string{"/bin/bash"}, unconfined
				if err := errors.Join(g.Make(), g.Start(t.Context(), "", p)); err != nil {
					t.Fatal(err)
				}
				if err := unix.Mount("tmpfs", late, "tmpfs", 0, ""); err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := unix.Unmount(late, unix.MNT_DETACH); err != nil {
						t.Error(err)
					}
				}()
				for node, device := range map[string]struct {
					kind         uint32
					major, minor uint32
				}{"console": {unix.S_IFCHR, 5, 1}, "null": {unix.S_IFCHR, 1, 3}, "zero": {unix.S_IFCHR, 1, 5}, "loop": {unix.S_IFBLK, 7, 0}} {
					if err := unix.Mknod(filepath.Join(late, node), device.kind|0o600, int(unix.Mkdev(device.major, device.minor))); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.WriteFile(filepath.Join(late, "go"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				until(t, "it has ended", func() bool { return len(processes(t, g)) == 0 })
				said, err := os.ReadFile(filepath.Join(folder, "output"))
				if err != nil {
					t.Fatal(err)
				}
				lines := strings.Split(string(said), "\n")
				for node, want := range map[string]bool{"null": true, "zero": true, "console": unconfined, "loop": unconfined} {
					if slices.Contains(lines, "opens "+node) != want {
						t.Errorf("opens %s: want %t: %s", node, want, said)
					}
				}
			})
		}
	}
}
