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

// answerOf does what the kernel does with a program about a device: its context has the access above the kind, and the numbers.
func answerOf(t *testing.T, program []instruction, context [3]int32) (answer int32) {
	t.Helper()
	var registers [11]int32
	for at := 0; at < len(program); at++ {
		i := program[at]
		to := i.registers & 0xf
		switch i.code {
		case unix.BPF_LDX | unix.BPF_W | unix.BPF_MEM:
			registers[to] = context[i.skip/4]
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			registers[to] &= i.value
		case unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_K:
			registers[to] = i.value
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JNE | unix.BPF_K:
			if isEqual := registers[to] == i.value; isEqual == (i.code&0xf0 == unix.BPF_JEQ) {
				at += int(i.skip)
			}
		case unix.BPF_JMP | unix.BPF_EXIT:
			return registers[0]
		default:
			t.Fatalf("instruction %d: %+v", at, i)
		}
	}
	t.Fatal("the program has no end")
	return 0
}

// TestWhichDevicesMayBeOpened: numbers of block devices are others than those of character devices, and minor numbers are a major's.
func TestWhichDevicesMayBeOpened(t *testing.T) {
	const block, character = unix.BPF_DEVCG_DEV_BLOCK, unix.BPF_DEVCG_DEV_CHAR
	program := deviceProgram([]uint32{195, 508})
	for _, tc := range []struct {
		name               string
		kind, major, minor int32
		want               int32
	}{
		{"null", character, 1, 3, 1},
		{"zero", character, 1, 5, 1},
		{"full", character, 1, 7, 1},
		{"random", character, 1, 8, 1},
		{"urandom", character, 1, 9, 1},
		{"a GPU", character, 195, 0, 1},
		{"nvidiactl", character, 195, 255, 1},
		{"nvidia-uvm-tools", character, 508, 1, 1},
		{"mem", character, 1, 1, 0},
		{"kmsg", character, 1, 11, 0},
		{"a console, whose minor is that of null", character, 4, 3, 0},
		{"a disk by its SCSI commands, likewise", character, 21, 3, 0},
		{"a disk in memory, whose numbers are those of null", block, 1, 3, 0},
		{"a disk whose major is the driver's", block, 508, 1, 0},
		{"a disk", block, 8, 0, 0},
	} {
		for access := int32(1); access < 8; access++ {
			if got := answerOf(t, program, [3]int32{access<<16 | tc.kind, tc.major, tc.minor}); got != tc.want {
				t.Errorf("%s, access %d: %d, want %d", tc.name, access, got, tc.want)
			}
		}
	}
}
