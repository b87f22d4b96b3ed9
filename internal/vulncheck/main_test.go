// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"strings"
	"testing"
)

const output = `{"config": {"protocol_version": "v1.0.0", "go_version": "go1.26.8", "scan_level": "symbol"}}
{"osv": {"id": "GO-1", "summary": "A server crashes", "affected": [{"module": {"path": "stdlib"}}]}}
{"finding": {"osv": "GO-1", "fixed_version": "v0.60.0", "trace": [{"module": "golang.org/x/net", "version": "v0.58.0"}]}}
{"finding": {"osv": "GO-1", "fixed_version": "v0.60.0", "trace": [
  {"module": "golang.org/x/net", "version": "v0.58.0", "package": "golang.org/x/net/http2", "function": "ServeConn", "receiver": "*Server"},
  {"module": "stowage.dev/stowage", "package": "stowage.dev/stowage/pkg/httpserver", "function": "Serve"}]}}
{"osv": {"id": "GO-2", "summary": "Only imported"}}
{"finding": {"osv": "GO-2", "trace": [{"module": "example.com/m", "version": "v1.0.0", "package": "example.com/m/p"}]}}
`

func TestOnlyWhatIsCalledAndNotAcceptedFails(t *testing.T) {
	tests := map[string]struct {
		output   string
		accepted map[string]string
		want     []string
	}{
		"called":               {output: output, want: []string{"GO-1 is called by pkg/httpserver.Serve"}},
		"accepted":             {output: output, accepted: map[string]string{"GO-1": "no server"}},
		"accepted in vain":     {output: output, accepted: map[string]string{"GO-1": "no server", "GO-2": "not called"}, want: []string{"GO-2 is accepted, and nothing calls it"}},
		"nothing is called":    {output: `{"config": {"go_version": "go1.26.8"}}`},
		"it ended early":       {output: output[:len(output)-20], want: []string{"unexpected EOF"}},
		"it has done nothing":  {output: "", want: []string{"does not tell its configuration"}},
		"it is something else": {output: "govulncheck: loading packages", want: []string{"invalid character"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			found, err := read(strings.NewReader(tc.output))
			if err == nil {
				err = errors.Join(judge(io.Discard, found.called, tc.accepted)...)
			}
			if (err == nil) != (len(tc.want) == 0) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q", err, want)
				}
			}
		})
	}
}

func TestWhereAndByWhatItIsFixedIsTold(t *testing.T) {
	found, err := read(strings.NewReader(output))
	if err != nil {
		t.Fatal(err)
	}
	var told strings.Builder
	judge(&told, found.called, nil)
	for _, want := range []string{"GO-1: A server crashes", "golang.org/x/net v0.58.0, fixed in: v0.60.0"} {
		if !strings.Contains(told.String(), want) {
			t.Errorf("it tells %q, want %q in it", told.String(), want)
		}
	}
}
