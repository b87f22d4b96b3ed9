// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"io"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// echo answers each line with the same line, until the test ends.
func echo(t *testing.T) (address string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return listener.Addr().String(), func() {
		listener.Close()
		<-done
	}
}

type client struct {
	t *testing.T
	net.Conn
	*bufio.Reader
}

func dial(t *testing.T, p *Proxy) client {
	t.Helper()
	conn, err := net.Dial("tcp", p.Address())
	if err != nil {
		t.Fatal(err)
	}
	return client{t, conn, bufio.NewReader(conn)}
}

// ask sends a line and returns how long the answer took.
func (c client) ask(line string) (time.Duration, error) {
	begin := time.Now()
	if _, err := io.WriteString(c.Conn, line+"\n"); err != nil {
		return 0, err
	}
	got, err := c.Reader.ReadString('\n')
	if err == nil && got != line+"\n" {
		c.t.Errorf("asked %q, got %q", line, got)
	}
	return time.Since(begin), err
}

func TestProxy(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	address, stop := echo(t)
	defer stop()
	p, err := Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()

	c := dial(t, p)
	defer c.Close()
	if _, err := c.ask("soon"); err != nil {
		t.Fatal(err)
	}
	const delay = 100 * time.Millisecond
	p.SetDelay(delay)
	if took, err := c.ask("late"); err != nil || took < delay {
		t.Errorf("with a delay of %s an answer took %s, error %v", delay, took, err)
	}
	// Later bytes do not overtake earlier ones when the delay ends.
	if _, err := io.WriteString(c.Conn, "first\n"); err != nil {
		t.Fatal(err)
	}
	p.SetDelay(0)
	if _, err := io.WriteString(c.Conn, "second\n"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first\n", "second\n"} {
		if got, err := c.Reader.ReadString('\n'); err != nil || got != want {
			t.Errorf("got %q, want %q; error %v", got, want, err)
		}
	}

	other := dial(t, p)
	defer other.Close()
	if _, err := other.ask("here"); err != nil {
		t.Fatal(err)
	}
	if n := p.Cut(); n != 2 {
		t.Errorf("%d connections were cut, want 2", n)
	}
	for _, c := range []client{c, other} {
		if _, err := c.ask("anybody"); err == nil {
			t.Error("a cut connection still answers")
		}
	}
	again := dial(t, p)
	defer again.Close()
	if _, err := again.ask("again"); err != nil {
		t.Errorf("after the cut: %v", err)
	}
}

func TestProxyWithoutServer(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	address, stop := echo(t)
	stop()
	p, err := Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	// The reset may come before Dial returns.
	if conn, err := net.Dial("tcp", p.Address()); err == nil {
		c := client{t, conn, bufio.NewReader(conn)}
		defer c.Close()
		if _, err := c.ask("anybody"); err == nil {
			t.Error("got an answer though no server is there")
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("tcp", p.Address()); err == nil {
		t.Error("a closed proxy accepts connections")
	}
}
