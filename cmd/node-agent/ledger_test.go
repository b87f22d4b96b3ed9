// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// ledgerOf makes a state folder with a claim in order, one with its previous copy left, one that cannot be read, and one in quarantine.
func ledgerOf(t *testing.T) (stateDir string) {
	t.Helper()
	stateDir = t.TempDir()
	records, err := ledger.Open(durable.OS{}, prepare.LedgerDir(stateDir))
	if err != nil {
		t.Fatal(err)
	}
	for i, uid := range []string{"a-fine", "b-previous", "c-torn"} {
		gpu := fmt.Sprintf("gpu-%d", i)
		entry := &ledger.Entry{Claim: ledger.Claim{UID: types.UID(uid), Namespace: "default", Name: uid[2:]}, Devices: []ledger.Device{{Request: "gpu", Device: gpu, GPU: gpu}}}
		entry.Updated = time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)
		for _, state := range []ledger.State{ledger.PrepareStarted, ledger.PrepareCompleted} {
			entry.State = state
			if err := records.Put(entry); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, file := range []string{"b-previous_gpu-1.claim", "c-torn_gpu-2.claim", "c-torn_gpu-2.claim.prev"} {
		if err := os.Truncate(filepath.Join(records.Dir(), file), 7); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(stateDir, "quarantine"), 0o700); err != nil {
		t.Fatal(err)
	}
	owed := `{"gpu":"gpu-3","owed":{"claim":{"uid":"d-owed","namespace":"default","name":"owed"},"undo":[{"kind":"MPSDaemon","target":"d-owed"}]},"reason":"it hangs","since":"2026-11-22T00:00:00Z"}`
	if err := os.WriteFile(filepath.Join(stateDir, "quarantine", "gpu-3_d-owed.quarantine"), []byte(owed), 0o600); err != nil {
		t.Fatal(err)
	}
	return stateDir
}

func runLedger(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(append([]string{"ledger"}, args...))
	cmd.SetOut(&out)
	err := cmd.Execute()
	return out.String(), err
}

func TestLedgerList(t *testing.T) {
	got, err := runLedger("list", "--state-dir="+ledgerOf(t))
	if err != nil {
		t.Fatal(err)
	}
	want := `CLAIM       NAME              DEVICES  STATE             READABLE       QUARANTINE
a-fine      default/fine      gpu-0    PrepareCompleted  yes            -
b-previous  default/previous  gpu-1    PrepareCompleted  previous copy  -
c-torn      -                 gpu-2    -                 no             -
d-owed      default/owed      gpu-3    -                 -              gpu-3
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
}

func TestLedgerShow(t *testing.T) {
	dir := ledgerOf(t)
	tests := map[string]string{
		"c-torn": `copies:
- path: DIR/claims/c-torn_gpu-2.claim
  problem: 'corrupt ledger record: no header line in 7 bytes'
- path: DIR/claims/c-torn_gpu-2.claim.prev
  problem: 'corrupt ledger record: no header line in 7 bytes'
devices:
- gpu-2
problem: 'corrupt ledger record: no header line in 7 bytes; nor can its previous copy,
  .claim.prev: corrupt ledger record: no header line in 7 bytes'
uid: c-torn
`,
		"default/owed": `devices:
- gpu-3
name: owed
namespace: default
quarantine:
- gpu: gpu-3
  owed:
  - MPSDaemon d-owed
  path: DIR/quarantine/gpu-3_d-owed.quarantine
  reason: it hangs
  since: "2026-11-22T00:00:00Z"
uid: d-owed
`,
		"b-previous": `copies:
- path: DIR/claims/b-previous_gpu-1.claim
  problem: 'corrupt ledger record: no header line in 7 bytes'
- content:
    claim:
      name: previous
      namespace: default
      uid: b-previous
    devices:
    - cdiDeviceIDs: null
      device: gpu-1
      gpu: gpu-1
      pool: ""
      request: gpu
      uuid: ""
    state: PrepareStarted
    updated: "2026-11-22T00:00:00Z"
  path: DIR/claims/b-previous_gpu-1.claim.prev
devices:
- gpu-1
name: previous
namespace: default
problem: 'corrupt ledger record: no header line in 7 bytes'
state: PrepareCompleted
uid: b-previous
`,
	}
	for claim, want := range tests {
		got, err := runLedger("show", claim, "--state-dir="+dir)
		if err != nil {
			t.Errorf("%s: %v", claim, err)
		}
		if diff := cmp.Diff(want, strings.ReplaceAll(got, dir, "DIR")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", claim, diff)
		}
	}
}

func TestLedgerSaysWhatIsWrong(t *testing.T) {
	dir, none := ledgerOf(t), filepath.Join(t.TempDir(), "none")
	tests := map[string]struct {
		args []string
		want string
		code int
	}{
		"no such folder":   {[]string{"list", "--state-dir=" + none}, "--state-dir " + none + ": there is no ledger: stat " + none + "/claims: no such file or directory", 1},
		"no such claim":    {[]string{"show", "e-none", "--state-dir=" + dir}, `claim "e-none": the ledger has no such claim; node-agent ledger list has them`, 4},
		"no such output":   {[]string{"show", "a-fine", "-o", "xml", "--state-dir=" + dir}, `--output "xml": want yaml or json`, 1},
		"nothing released": {[]string{"release", "e-none", "--state-dir=" + dir}, `claim "e-none": the ledger has no such claim; node-agent ledger list has them`, 4},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := runLedger(tc.args...)
			if err == nil || err.Error() != tc.want || exitCode(err) != tc.code {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
	if _, err := os.Stat(none); err == nil {
		t.Error("the folder has been made")
	}
	for err, code := range map[error]int{fmt.Errorf("%w: a pod", prepare.ErrInUse): 2, errQuarantined: 3, errors.New("no"): 1} {
		if got := exitCode(err); got != code {
			t.Errorf("%v: exit code %d, want %d", err, got, code)
		}
	}
}
