// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/prepare"
)

func TestDrainWaitsForCallsAndTheirAnswers(t *testing.T) {
	const prepare = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
	tests := map[string]struct {
		method string
		// Calls begin at these times, each takes a second.
		calls []time.Duration
		// draining begins at drain and may take limit.
		drain, limit time.Duration
		want         time.Duration
	}{
		"no call ever":                       {method: prepare, drain: time.Second, limit: time.Minute, want: 0},
		"the last one was answered long ago": {method: prepare, calls: []time.Duration{0}, drain: 5 * time.Second, limit: time.Minute, want: 0},
		"the last one has just ended":        {method: prepare, calls: []time.Duration{0}, drain: 1100 * time.Millisecond, limit: time.Minute, want: 100 * time.Millisecond},
		"one is under way":                   {method: prepare, calls: []time.Duration{0}, drain: 400 * time.Millisecond, limit: time.Minute, want: 800 * time.Millisecond},
		"the other API version": {
			method: "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
			calls:  []time.Duration{0}, drain: 400 * time.Millisecond, limit: time.Minute, want: 800 * time.Millisecond,
		},
		"another one comes before the answer is out": {
			method: prepare, calls: []time.Duration{0, 1100 * time.Millisecond}, drain: 400 * time.Millisecond, limit: time.Minute, want: 1900 * time.Millisecond,
		},
		"several":                {method: prepare, calls: []time.Duration{0, 300 * time.Millisecond}, drain: 400 * time.Millisecond, limit: time.Minute, want: 1100 * time.Millisecond},
		"no longer than allowed": {method: prepare, calls: []time.Duration{0}, drain: 400 * time.Millisecond, limit: 500 * time.Millisecond, want: 500 * time.Millisecond},
		"a call of another API": {
			method: "/pluginregistration.Registration/GetInfo",
			calls:  []time.Duration{0}, drain: 400 * time.Millisecond, limit: time.Minute, want: 0,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var c calls
				for _, begin := range tc.calls {
					go func() {
						time.Sleep(begin)
						_, _ = c.intercept(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: tc.method}, func(context.Context, any) (any, error) {
							time.Sleep(time.Second)
							return nil, nil
						})
					}()
				}
				time.Sleep(tc.drain)
				start := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), tc.limit)
				defer cancel()
				c.drain(ctx)
				if took := time.Since(start); took != tc.want {
					t.Errorf("took %s, want %s", took, tc.want)
				}
				time.Sleep(time.Minute) // the calls end
			})
		})
	}
}

// TestARollBackEndsBeforeTheAgent: one that has begun when the agent is told to stop has its time, and the kubelet kills the agent
// later than that.
func TestARollBackEndsBeforeTheAgent(t *testing.T) {
	if drainTimeout < prepare.DefaultUndoTimeout+answerTime {
		t.Errorf("the agent goes on for %s, and a roll-back may take %s", drainTimeout, prepare.DefaultUndoTimeout)
	}
	const manifest = "../../../manifests/base/node-agent/daemonset.yaml"
	data, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	var agent appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(data, &agent); err != nil {
		t.Fatal(err)
	}
	seconds := agent.Spec.Template.Spec.TerminationGracePeriodSeconds
	if seconds == nil {
		t.Fatalf("%s: terminationGracePeriodSeconds is not set", manifest)
	}
	if grace := time.Duration(*seconds) * time.Second; grace < drainTimeout+3*time.Second {
		t.Errorf("%s: terminationGracePeriodSeconds: %d: the agent goes on for %s, and has to end then", manifest, *seconds, drainTimeout)
	}
}
