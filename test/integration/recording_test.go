// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"stowage.dev/stowage/internal/localcluster"
)

// auditPolicy has the API servers of this package record what the accounts of the manifests ask for.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users:
  - system:serviceaccount:stowage-system:stowage-scheduler
  - system:serviceaccount:stowage-node-agent:stowage-node-agent
  - system:serviceaccount:` + readers + `:` + reader + `
  - ` + doctor + `
- level: None
`

// doctor is the account with which 'kubectl stowage doctor' is tried, and mayLack the right that it asks for beyond its manifest's: it says which
// checks it leaves out.
const (
	doctor  = "system:serviceaccount:default:doctor"
	mayLack = "get nodes/proxy"
)

// recording is what the API servers recorded, in a folder of its own.
type recording struct {
	dir string

	mutex    sync.Mutex
	clusters int
	// shown are rights that a test saw at work where the API server records nothing.
	shown map[string]bool
}

var recorded = &recording{shown: map[string]bool{}}

// start makes the folder, which stop removes.
func (r *recording) start() (stop func(), err error) {
	if r.dir, err = os.MkdirTemp("", "stowage-recording-"); err != nil {
		return nil, err
	}
	stop = func() { _ = os.RemoveAll(r.dir) }
	return stop, os.WriteFile(filepath.Join(r.dir, "policy.yaml"), []byte(auditPolicy), 0o600)
}

// of adds to the options of a cluster what its API server needs to record.
func (r *recording) of(options localcluster.Options) localcluster.Options {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.clusters++
	options.APIServerArgs = map[string]string{
		"audit-policy-file": filepath.Join(r.dir, "policy.yaml"),
		"audit-log-path":    filepath.Join(r.dir, fmt.Sprintf("%d.log", r.clusters)),
		"audit-log-maxsize": "8192", // MiB: one file
	}
	return options
}

// show says that a test saw a right at work.
func (r *recording) show(right string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.shown[right] = true
}

// ofTests is how requests begin to name their sender that a test makes itself, with an account of ours.
const ofTests = "integration.test/"

// answersOfUse are those of failed requests that show a right at work all the same: another one was faster, or a watch is too old.
var answersOfUse = []int32{http.StatusNotFound, http.StatusConflict, http.StatusGone}

// allowedBy is how RBAC says which role it is that allows a request.
var allowedBy = regexp.MustCompile(`^RBAC: allowed by .* of (?:Cluster)?Role "([^"]+)"`)

// used returns the rights that were used, and the requests that were refused for want of one. What tests ask themselves does not count, and neither
// do dry runs, by which scheduler and agent try what they must not be able to do, nor requests that were in vain: some rights are asked for in the
// course of one, and where they are missing it is invalid.
func (r *recording) used() (used map[string]bool, refused []string, err error) {
	used = maps.Clone(r.shown)
	logs, err := filepath.Glob(filepath.Join(r.dir, "*.log"))
	for _, log := range logs {
		err = errors.Join(err, readEvents(log, func(e *auditv1.Event) {
			if strings.HasPrefix(e.UserAgent, ofTests) || e.ObjectRef == nil || strings.Contains(e.RequestURI, "dryRun=") {
				return
			}
			right := rightOf(e.Verb, e.ObjectRef.APIGroup, e.ObjectRef.Resource, e.ObjectRef.Subresource)
			role := allowedBy.FindStringSubmatch(e.Annotations["authorization.k8s.io/reason"])
			switch {
			case e.User.Username == doctor && right == mayLack:
			case e.Annotations["authorization.k8s.io/decision"] != "allow" && e.ResponseStatus != nil && e.ResponseStatus.Code == 403:
				refused = append(refused, fmt.Sprintf("%s (%s) may not %s of %s/%s: %s", e.User.Username, e.UserAgent, right, e.ObjectRef.Namespace, e.ObjectRef.Name, e.ResponseStatus.Message))
			case e.ResponseStatus != nil && e.ResponseStatus.Code >= 400 && !slices.Contains(answersOfUse, e.ResponseStatus.Code):
			case e.ImpersonatedUser != nil:
				used["stowage-node-agent: impersonate-on:associated-node:"+right] = true
			case role != nil:
				used[role[1]+": "+right] = true
			}
		}))
	}
	slices.Sort(refused)
	return used, slices.Compact(refused), err
}

func readEvents(log string, each func(*auditv1.Event)) error {
	file, err := os.Open(log)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewReader(file)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // the last line may be half of one
		} else if err != nil {
			return err
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return fmt.Errorf("%s: %w", log, err)
		}
		each(&event)
	}
}

// rightOf names a right, for example "update resourceclaims.resource.k8s.io/status".
func rightOf(verb, group, resource, subresource string) string {
	right := verb + " " + resource
	if group != "" {
		right += "." + group
	}
	if subresource != "" {
		right += "/" + subresource
	}
	return right
}

// grantedRights are those of all roles in the manifests.
func grantedRights() (map[string]bool, error) {
	granted := map[string]bool{}
	return granted, filepath.WalkDir(manifests, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" || entry.Name() == "noderesourcetopologies.yaml" {
			return err
		}
		roles, err := readRoles(path)
		for _, role := range roles {
			for _, rule := range role.Rules {
				for _, verb := range rule.Verbs {
					for _, name := range rule.Resources {
						resource, subresource, _ := strings.Cut(name, "/")
						for _, group := range rule.APIGroups {
							granted[role.Name+": "+rightOf(verb, group, resource, subresource)] = true
						}
					}
					for _, url := range rule.NonResourceURLs {
						granted[role.Name+": "+verb+" "+url] = true
					}
				}
			}
		}
		return err
	})
}

// judge returns what is wrong: a request was refused for want of a right, or, when all tests have run, a right is granted that none used.
func (r *recording) judge(all bool) []error {
	granted, err := grantedRights()
	used, refused, unread := r.used()
	problems := slices.DeleteFunc([]error{err, unread}, func(err error) bool { return err == nil })
	for _, request := range refused {
		problems = append(problems, errors.New(request))
	}
	if !all {
		return problems
	}
	for _, right := range slices.Sorted(maps.Keys(granted)) {
		switch implied, ok := impliedBy[right]; {
		case used[right] && (ok || notRecorded[right] != ""):
			problems = append(problems, fmt.Errorf("%s was used: take it out of the tables", right))
		case used[right], ok && used[implied], notRecorded[right] != "":
		default:
			problems = append(problems, fmt.Errorf("%s is granted, and no test used it", right))
		}
	}
	for _, table := range []map[string]string{impliedBy, notRecorded} {
		for right := range table {
			if !granted[right] {
				problems = append(problems, fmt.Errorf("%s is in a table, and nobody grants it", right))
			}
		}
	}
	return problems
}

// impliedBy has rights that the API server asks for in the course of a request for which it records another one.
var impliedBy = map[string]string{
	"stowage-scheduler: update resourceclaims.resource.k8s.io/binding":                "stowage-scheduler: update resourceclaims.resource.k8s.io/status",
	"stowage-node-agent: impersonate:associated-node nodes.authentication.k8s.io":     "stowage-node-agent: impersonate-on:associated-node:list pods",
	"stowage-node-agent: associated-node:patch resourceclaims.resource.k8s.io/driver": "stowage-node-agent: patch resourceclaims.resource.k8s.io/status",
}

// notRecorded has rights that no test of this package can have used by code of ours, and why. It must only get shorter.
var notRecorded = map[string]string{
	"stowage-metrics-reader: get /readyz":                                      "others are asked whether somebody may; the agent tells reasons only while it is not ready: cmd/node-agent TestTheAPIServerSaysWhoReads",
	"stowage-scheduler-numa: list noderesourcetopologies.topology.node.k8s.io": "for an API server that streams no lists; the one of TestFeaturesThatAreOffByDefault does not have this API",
}

// judged are the tests of the package, after which the recording is judged.
type judged struct{ tests interface{ Run() int } }

func (j judged) Run() int {
	code := j.tests.Run()
	all := code == 0 && !testing.Short()
	for _, name := range []string{"test.run", "test.skip", "test.list", "test.bench", "test.fuzz"} {
		all = all && flag.Lookup(name).Value.String() == ""
	}
	for _, problem := range recorded.judge(all) {
		fmt.Fprintln(os.Stderr, "rights:", problem)
		code = max(code, 1)
	}
	if n := followed.Load(); all && n < leastFollowed {
		fmt.Fprintf(os.Stderr, "advice: %d tests ended with a pod that runs by what 'why' proposes, want %d at least\n", n, leastFollowed)
		code = max(code, 1)
	} else if n > 0 {
		fmt.Fprintf(os.Stderr, "advice: %d tests ended with a pod that runs by what 'why' proposes, which took %v\n", n, time.Duration(following.Load()))
	}
	return code
}
