// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import "testing"

// BenchmarkPrepare is what a call to a plugin costs over the one connection that all calls share, and over one that is made for the call.
func BenchmarkPrepare(b *testing.B) {
	socket := socketPath(b)
	(&fakePlugin{}).serve(b, socket)
	dial := func() *Client {
		c, err := New(Plugin{Driver: driver, Endpoint: socket, Services: []string{"v1.DRAPlugin"}}, 0)
		if err != nil {
			b.Fatal(err)
		}
		return c
	}
	call := func(c *Client) {
		if err := prepareOne(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("shared connection", func(b *testing.B) {
		c := dial()
		defer c.Close()
		for b.Loop() {
			call(c)
		}
	})
	b.Run("connection for each call", func(b *testing.B) {
		for b.Loop() {
			c := dial()
			call(c)
			c.Close()
		}
	})
}
