// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAReservedPortIsOnlyForThoseWhoShareIt(t *testing.T) {
	seen := map[int]bool{}
	for range 20 {
		port, err := ReservePort()
		if err != nil {
			t.Fatal(err)
		}
		defer port.Release()
		if seen[port.Number] {
			t.Fatalf("port %d was given twice", port.Number)
		}
		seen[port.Number] = true
		if listener, err := listen(t.Context(), port.Address(), false); err == nil {
			listener.Close()
			t.Errorf("port %d can be taken by anybody", port.Number)
		}
		listener, err := listen(t.Context(), port.Address(), true)
		if err != nil {
			t.Errorf("port %d cannot be shared: %v", port.Number, err)
			continue
		}
		listener.Close()
	}
}

// listen listens on an address, sharing its port or not.
func listen(ctx context.Context, address string, share bool) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		if !share {
			return nil
		}
		var optErr error
		err := conn.Control(func(fd uintptr) {
			optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		})
		if err != nil {
			return err
		}
		return optErr
	}}
	return config.Listen(ctx, "tcp4", address)
}
