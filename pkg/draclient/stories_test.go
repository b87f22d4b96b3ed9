// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
)

// The four ways in which clients that are made when they are first needed have failed.

// First: two callers that come first at the same time both make a client, and one of the two connections is never closed.
func TestStoryOfTheRace(t *testing.T) {
	socket := socketPath(t)
	server := &fakePlugin{}
	server.serve(t, socket)
	r := newRegistry(t)
	if err := r.Register(plugin(socket)); err != nil {
		t.Fatal(err)
	}
	start := make(chan struct{})
	var callers sync.WaitGroup
	for range 64 {
		callers.Go(func() {
			<-start
			c, err := r.Get(driver)
			if err != nil {
				t.Error(err)
				return
			}
			if err := prepareOne(t.Context(), c); err != nil {
				t.Error(err)
			}
		})
	}
	close(start)
	callers.Wait()
	if n := server.accepted.Load(); n != 1 {
		t.Errorf("64 first calls at once made %d connections, want 1", n)
	}
}

// Second: the connection is made again, and one of the typed clients still has the old one.
func TestStoryOfTheReconnect(t *testing.T) {
	socket := socketPath(t)
	r := newRegistry(t)
	served := plugin(socket)
	served.Services = append(served.Services, "v1.DRAResourceHealth")
	if err := r.Register(served); err != nil {
		t.Fatal(err)
	}
	every := func(c *Client) error {
		if err := prepareOne(t.Context(), c); err != nil {
			return err
		}
		if _, err := c.Unprepare(t.Context(), claims("uid")); err != nil {
			return err
		}
		return healthOnce(t.Context(), c)
	}
	for _, again := range []bool{false, false, true, true} {
		stop := (&fakePlugin{}).serve(t, socket)
		if again {
			// The plugin registers again when it has started, as the kubelet's plugin watcher makes it.
			if err := r.Register(served); err != nil {
				t.Fatal(err)
			}
		}
		c, err := r.Get(driver)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error { return every(c) })
		stop()
		if err := prepareOne(t.Context(), c); err == nil {
			t.Fatal("a call to a stopped server succeeded")
		}
	}
}

// Third: the first call fails, because the plugin is not there yet, and the client stays without a connection for good.
func TestStoryOfTheFirstCall(t *testing.T) {
	socket := socketPath(t)
	c := newClient(t, socket, "v1.DRAPlugin", "v1.DRAResourceHealth")
	if err := prepareOne(t.Context(), c); err == nil {
		t.Fatal("a call without a server succeeded")
	}
	if stream, err := c.WatchHealth(t.Context()); err == nil {
		if _, err = stream.Recv(); err == nil {
			t.Fatal("a stream without a server succeeded")
		}
	}
	(&fakePlugin{}).serve(t, socket)
	// The health client first: a connection that prepare has mended proves nothing of it.
	eventually(t, func() error { return healthOnce(t.Context(), c) })
	eventually(t, func() error { return prepareOne(t.Context(), c) })
}

// Fourth: each reconnect leaves a client behind, with its goroutines and its socket.
func TestStoryOfTheLeak(t *testing.T) {
	socket := socketPath(t)
	server := &fakePlugin{}
	server.serve(t, socket)
	r := newRegistry(t)
	served := plugin(socket)
	served.Services = append(served.Services, "v1.DRAResourceHealth")
	reconnect := func() {
		t.Helper()
		if err := r.Register(served); err != nil {
			t.Fatal(err)
		}
		c, err := r.Get(driver)
		if err != nil {
			t.Fatal(err)
		}
		if err := prepareOne(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		// A stream that is open when the client is replaced.
		if _, err := c.WatchHealth(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		reconnect()
	}
	settled := func() error {
		if n := server.connections.Load(); n != 1 {
			return fmt.Errorf("%d connections of one plugin are open, want 1", n)
		}
		return nil
	}
	eventually(t, settled)
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for range 1000 {
		reconnect()
	}
	eventually(t, func() error {
		if err := settled(); err != nil {
			return err
		}
		// The server's side closes a little later; a leak would be a thousand.
		if g, f := runtime.NumGoroutine(), openFiles(t); g > goroutines+4 || f > files+4 {
			return fmt.Errorf("after 1,000 reconnects %d goroutines and %d open files, before %d and %d", g, f, goroutines, files)
		}
		return nil
	})
	if err := r.Deregister(driver, socket); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if n := server.connections.Load(); n != 0 {
			return fmt.Errorf("%d connections are open after the plugin was deregistered", n)
		}
		return nil
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestARegistrarIsAskedWithoutRegisteringItsPlugin(t *testing.T) {
	socket := socketPath(t)
	(&fakePlugin{}).serve(t, socket)
	if _, _, err := Ask(t.Context(), socket+".gone"); err == nil {
		t.Error("a registrar that is not there answers")
	}
	if _, _, err := Ask(t.Context(), socket); err == nil {
		t.Error("what is no registrar answers")
	}
}
