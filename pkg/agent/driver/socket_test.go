// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// TestWhoHasTakenASocket is in the error, for the log, and not in its text: the Node would be written each time the process is started anew.
func TestWhoHasTakenASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, err = listenOn(path)
	var taken *socketError
	if !errors.As(err, &taken) || int(taken.PID) != os.Getpid() || taken.Err != nil {
		t.Fatalf("%#v, want PID %d", err, os.Getpid())
	}
	if want := "the socket " + path + " is served by another process, not by this agent"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
}

// TestTheDriversFolderIsMadeAnewWithItsSocket, and the kubelet's is not: the kubelet would not see what comes into one that somebody else made.
func TestTheDriversFolderIsMadeAnewWithItsSocket(t *testing.T) {
	root, err := os.MkdirTemp("", "folder") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	for folder, anew := range map[string]bool{Name: true, "plugins_registry": false} {
		t.Run(folder, func(t *testing.T) {
			dir := filepath.Join(root, folder)
			if err := os.Mkdir(dir, 0o750); err != nil {
				t.Fatal(err)
			}
			s, err := listenOn(filepath.Join(dir, "s"))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if renewed, err := s.keep(func() {}); renewed != anew || (err == nil) != anew {
				t.Errorf("made anew: %t, %v, want %t", renewed, err, anew)
			}
		})
	}
}
