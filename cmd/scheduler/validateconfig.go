// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"stowage.dev/stowage/pkg/plugins"
)

// validateConfig prints what is wrong with a configuration file. The error says that a scheduler would not start with it.
func validateConfig(ctx context.Context, out io.Writer, opts *options.Options, file string) error {
	if opts.ConfigFile != "" {
		return errors.New("--validate-config checks the file that it names: give it without --config")
	}
	findings, err := checkConfig(ctx, opts, file)
	if err != nil {
		return fmt.Errorf("--validate-config: %w", err)
	}
	for _, finding := range findings {
		fmt.Fprintln(out, finding.Text())
	}
	bad := len(refused(findings))
	warnings := len(findings) - bad
	if bad > 0 {
		return fmt.Errorf("%s: %d refused, %s: the scheduler does not start with it", file, bad, countWarnings(warnings))
	}
	fmt.Fprintf(out, "%s: nothing refused, %s. Not looked at: the cluster, and files that it names\n", file, countWarnings(warnings))
	return nil
}

func countWarnings(n int) string {
	if n == 1 {
		return "1 warning"
	}
	return fmt.Sprintf("%d warnings", n)
}

// explained adds to an error of the start all that is wrong with the configuration file. A start ends with the first.
func explained(ctx context.Context, opts *options.Options, err error) error {
	if opts.ConfigFile == "" {
		return err
	}
	findings, readErr := checkConfig(ctx, opts, opts.ConfigFile)
	if readErr != nil {
		return err
	}
	if bad := refused(findings); len(bad) > 0 {
		var unreadable *kubeconfigError
		if errors.As(err, &unreadable) { // which the check of the file does not look at
			bad = append(bad, plugins.Finding{
				Field: "clientConnection.kubeconfig", Value: unreadable.file, Problem: "the kubeconfig cannot be read: " + unreadable.err.Error(),
				Change: "correct the path; in a pod, remove it: the ServiceAccount counts",
			})
		}
		return &refusedError{file: opts.ConfigFile, findings: bad, cause: err}
	}
	return err
}

// refusedError is an error of the start that the configuration file explains.
type refusedError struct {
	file     string
	findings []plugins.Finding
	cause    error
}

func (e *refusedError) Error() string {
	text := fmt.Sprintf("--config %s is refused:", e.file)
	for _, finding := range e.findings {
		text += "\n" + finding.Text()
	}
	return text + "`scheduler --validate-config " + e.file + "` checks it without a cluster"
}

func (e *refusedError) Unwrap() error { return e.cause }
