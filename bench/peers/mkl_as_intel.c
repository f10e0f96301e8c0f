/* Preloaded, MKL takes an AMD CPU for Intel's, and its code for the vectors that the CPU has. */
static int yes(void) { return 1; }
int (*mkl_serv_get_cpu(void))(void) { return yes; }
int (*mkl_serv_get_cpu_true(void))(void) { return yes; }
int mkl_serv_cpuiszen(void) { return 0; }
