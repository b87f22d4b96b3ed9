// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/driver"
)

// TestWhatAPodIsToldOfADiskThatFails: the text, with real file systems. A path is in it once, and nothing of the lock that was to be taken.
func TestWhatAPodIsToldOfADiskThatFails(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		breaks func(m *machine) error
		want   string // STATE stands for the state folder, CLAIM for the claim
	}{
		"read-only": {
			breaks: func(m *machine) error {
				// Above the other mount, which the agent has files open of.
				err := unix.Mount(m.path("state"), m.path("state"), "", unix.MS_BIND, "")
				if err == nil {
					m.t.Cleanup(func() { must(m.t, unix.Unmount(m.path("state"), unix.MNT_DETACH)) })
					err = unix.Mount("none", m.path("state"), "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
				}
				return err
			},
			want: "prepare claim default/CLAIM (CLAIM-uid): open STATE/locks/claims.lock: read-only file system",
		},
		"full": {
			breaks: func(m *machine) error {
				err := os.WriteFile(m.path("state", "all"), make([]byte, 2<<20), 0o600)
				if errors.Is(err, unix.ENOSPC) {
					return nil
				}
				return errors.Join(err, errors.New("there is room"))
			},
			want: "write ledger record of claim default/CLAIM (CLAIM-uid): write STATE/claims/CLAIM-uid_" + gpu0 + ".claim.tmp: no space left on device",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			must(t, os.Mkdir(m.path("state"), 0o700))
			if err := unix.Mount("none", m.path("state"), "tmpfs", 0, "size=1m"); errors.Is(err, unix.EPERM) {
				t.Skip("only root can mount")
			} else if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { must(t, unix.Unmount(m.path("state"), unix.MNT_DETACH)) })
			m.run("")
			m.register(driver.Name + "-reg.sock")
			m.waitForGPUs(8)
			must(t, tc.breaks(m))
			for _, claim := range []string{"first", "second"} {
				got := m.prepare(m.allocate(claim, gpu0)).GetError()
				if got = strings.NewReplacer(m.path("state"), "STATE", claim, "CLAIM").Replace(got); got != tc.want {
					t.Errorf("claim %s: %s\nwant %s", claim, got, tc.want)
				}
			}
			m.waitReadyz(http.StatusServiceUnavailable)
		})
	}
}
